"""What users of other checkpoint software have reported, and the tests that try it here. Each
scenario is written once, beside the part of the software that it is about.

Not tried, because this version has nothing for it: weights of reinforcement learning as
differences (areal), GPU memory written to a file without the host's memory (cuda-checkpoint), a
copy in a remote storage after the local one (NeMo Automodel), and what concerns several nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COMPLAINTS: dict[str, tuple[str, ...]] = {
    "steps were mixed inside of one checkpoint (Lightning)": (
        "promises/test_p4_one_step.py::test_no_torn_checkpoint_is_durable",
    ),
    "CPU tensors were saved after their update (PyTorch)": (
        "promises/test_p4_one_step.py::test_the_update_waits_for_the_copy",
        "promises/test_p4_one_step.py::test_without_the_gate_the_snapshot_is_torn",
    ),
    "the number of the step was read late (Megatron-Bridge)": (
        "integration/test_client.py::test_steps_and_metadata_are_taken_by_value",
    ),
    "an empty newest checkpoint breaks resuming (transformers)": (
        "promises/test_p1_copied.py::test_killed_while_copying_the_one_before_is_recovered",
        "promises/test_p7_no_fresh_start.py::test_what_was_never_copied_does_not_count",
    ),
    "the save at SIGTERM fired 0 of 6 times (spd)": (
        "promises/test_p5_harmless.py::test_every_sigterm_gets_its_checkpoint",
        "integration/test_ends_of_a_run.py::test_torchrun_stops_all_ranks_after_the_same_step",
    ),
    "a damaged local checkpoint ends the resume, without a fallback (Megatron-LM)": (
        "promises/test_p3_newest_wins.py::test_damaged_data_falls_to_the_one_before",
        "promises/test_p3_newest_wins.py::test_a_group_recovers_the_step_before",
    ),
    "no checksums of a checkpoint (torchtitan)": (
        "promises/test_p3_newest_wins.py::test_verify_takes_the_flag_away_once_all_is_whole",
    ),
    "a failure of one does not fail the commit of the others (VeOmni)": (
        "integration/test_group.py::test_a_step_that_one_rank_leaves_out_is_given_up_on_all",
        "integration/test_group.py::test_wait_global_ends_for_a_step_that_a_rank_never_gets",
    ),
    "a resume that finds and cannot load begins at step 0 (marin)": (
        "promises/test_p3_newest_wins.py::"
        "test_when_nothing_can_be_read_it_says_so_and_no_flag_is_left",
        "promises/test_p3_newest_wins.py::test_a_group_of_which_nothing_can_be_read_is_not_empty",
        "promises/test_p7_no_fresh_start.py::test_a_daemon_that_comes_late_does_not_look_empty",
    ),
    "a stream resumes at another place from its second pass on (transformers)": (
        "frameworks/test_hf_shapes.py::test_passes_whose_length_trainer_does_not_know_resume",
    ),
    "a save between evaluation and training has the weights of neither (schedule_free)": (
        "frameworks/test_hf_shapes.py::test_what_moves_weights_at_a_step_fails_no_checkpoint",
    ),
    "a quantized base with adapters was saved and cannot be loaded (peft, bitsandbytes)": (
        "frameworks/test_hf_shapes.py::test_adapters_are_saved_without_a_base_that_is_refused",
    ),
    "loader and model are restored from different steps (torchtitan)": (
        "integration/test_loaders.py::test_losses_are_equal_bit_for_bit",
        "frameworks/test_lightning.py::test_a_killed_training_goes_on_bit_for_bit",
    ),
    "a failed save stops the training (Megatron-LM)": (
        "promises/test_p5_harmless.py::test_training_goes_on_without_the_daemon",
        "integration/test_small_disks.py::test_a_full_disk_is_named_and_what_fits_goes_on",
    ),
    "the other ranks never learn of a dead worker (Megatron-LM)": (
        "integration/test_group.py::"
        "test_what_a_killed_rank_had_not_copied_ends_the_wait_for_all_ranks",
    ),
    "what was saved before a preemption is not committed (ray)": (
        "integration/test_group.py::test_what_was_copied_is_waited_for",
        "promises/test_p1_copied.py::test_killed_after_copied_it_becomes_durable",
    ),
    "CUDA IPC fails for expandable segments in containers (PyTorch, UCX)": (
        "integration/test_gpu_push.py::test_memory_that_cannot_be_shared",
    ),
    "times of saves are no metrics (OLMo-core, ray)": (
        "integration/test_observability.py::test_metrics_of_a_job_and_every_name_in_use",
    ),
    "a good step cannot be kept, and gone back to after a spike of the loss (NeMo Speech)": (
        "integration/test_pinning.py::test_a_pinned_checkpoint_outlives_kill_and_restart",
        "integration/test_api.py::test_a_run_goes_back_to_a_step_and_goes_on_from_there",
    ),
    "later saves silently wrote the weights of the first one (NeMo RL)": (
        "complaints/test_saves.py::test_later_saves_silently_wrote_the_weights_of_the_first_one",
    ),
    "a cached plan silently dropped a shard (Megatron-LM)": (
        "complaints/test_saves.py::test_a_cached_plan_silently_dropped_a_shard",
        "unit/pccheck/restoring/test_shards.py::test_a_local_part_that_was_replaced_is_seen",
    ),
    "host memory grew by a checkpoint with every save (PyTorch, Megatron-Bridge)": (
        "complaints/test_saves.py::test_host_memory_grew_by_a_checkpoint_with_every_save",
    ),
    "staging the whole state took the memory of the node (Megatron)": (
        "complaints/test_saves.py::test_staging_the_whole_state_took_the_memory_of_the_node",
        "integration/test_in_flight.py::test_more_state_than_dram",
    ),
    "saving outran the disk, and so saving failed (DLRover)": (
        "complaints/test_saves.py::test_saving_outran_the_disk_and_so_saving_failed",
    ),
    "shared memory went with the trainer, or filled /dev/shm (DLRover)": (
        "complaints/test_saves.py::test_shared_memory_went_with_the_trainer_or_filled_dev_shm",
    ),
    "every checkpoint wrote the frozen base again (dreamzero, Megatron-LM)": (
        "complaints/test_saves.py::test_every_checkpoint_wrote_the_frozen_base_again",
    ),
    "the loss after a restart is higher: optimizer and scheduler were not loaded (Enerzyme)": (
        "complaints/test_resumes.py::test_a_restarted_fine_tuning_began_with_pretrained_weights",
        "integration/test_loaders.py::test_losses_are_equal_bit_for_bit",
    ),
    "`latest` was moved and old ones removed before the new one was durable (KempnerForge)": (
        "promises/test_p1_copied.py::test_killed_while_copying_the_one_before_is_recovered",
        "promises/test_p2_durable.py::test_nothing_is_told_durable_that_a_restart_does_not_find",
    ),
    "the optimizer is not loaded in another number of ranks (Fast-LLM)": (
        "integration/test_sharded.py::test_another_mesh_and_another_number_of_ranks_go_on",
        "complaints/test_resumes.py::test_ranks_that_held_nothing_of_a_parameter_lost_its_moments",
    ),
    "a restart by the same command begins at step 0 (deepmed)": (
        "smoke/test_programs.py::test_the_shortest_script_goes_on_where_it_was",
    ),
    "a fifth of the saves hung for hours (Orbax)": (
        "complaints/test_resumes.py::test_a_disk_that_hung_held_training_for_hours",
        "integration/test_client.py::test_a_stopped_daemon_costs_one_stall_and_then_nothing",
    ),
    "rank 0 alone cannot load the optimizer and broadcast it (PyTorch)": (
        "complaints/test_resumes.py::test_ranks_that_held_nothing_of_a_parameter_lost_its_moments",
    ),
    "the loss before and after a resume differs: packed and streamed data (ms-swift)": (
        "smoke/test_programs.py::test_a_campaign_ends_well",  # of a packed stream, and of adapters
    ),
    "a file that was half written at kill -9 counts as no checkpoint (affinity)": (
        "promises/test_p3_newest_wins.py::"
        "test_when_nothing_can_be_read_it_says_so_and_no_flag_is_left",
        "promises/test_p1_copied.py::test_killed_while_copying_the_one_before_is_recovered",
    ),
    "ranks other than 0 have no state of the optimizer (apex)": (
        "integration/test_odd_trainers.py::"
        "test_zero_of_torch_goes_on_bit_for_bit_with_its_scheduler",
    ),
    "the loss kept the model from before the resume (sentence-transformers)": (
        "complaints/test_resumes.py::test_the_loss_kept_the_model_from_before_the_resume",
    ),
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_this_complaint_has_a_test(complaint: str) -> None:
    for named in COMPLAINTS[complaint]:
        file, _, test = named.partition("::")
        assert f"\ndef {test}(" in (TESTS / file).read_text(), named
