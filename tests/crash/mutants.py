"""Broken protocols, each of which an enumerator must catch, or a native test where no crash tells.

Some are made by the simulated disk (`arguments`), the others are changed copies of one core source:
the text must occur once in today's source, white space aside, else this fails. Nothing in native/
is touched.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mutant import Mutant
from native_mutants import NATIVE, NATIVE_MUTANTS, TESTS

HERE = Path(__file__).parent
#: Some mutants are convicted by few histories, so that one seed may miss them.
SEEDS = ("20250711", "2", "3")
#: One seed after the other convicts most with few images, and the rest with many.
IMAGES = ("300000", "2000000")
CORE = HERE.parents[1] / "native" / "src"


MUTANTS = (
    Mutant("no first flush", "the record overtakes its data", arguments=("--mutant", "no-flush")),
    Mutant(
        "no second flush",
        "acknowledged while the record is in the drive's cache",
        arguments=("--mutant", "no-durable"),
    ),
    Mutant(
        "no msync",
        "the record overtakes pages that were stored long ago",
        arguments=("--model", "mmap", "--mutant", "no-flush"),
    ),
    Mutant(
        "no fence",
        "the record overtakes words on their way to persistent memory",
        arguments=("--model", "pmem", "--mutant", "no-flush"),
    ),
    Mutant(
        "failed record forgotten",
        "the error was another checkpoint's page, and is told once",
        arguments=("--model", "mmap"),
        source="disk/pcc_commit.c",
        old="PCC_WRITE_RELEASE(&volume->stopped, true);",
        new="(void)0;",
        seed="12",
    ),
    Mutant("wrong slot", "data one slot too far", arguments=("--mutant", "wrong-slot"), seed="8"),
    Mutant(
        "single record",
        "every record in one place",
        source="disk/pcc_format.c",
        old="        return generation * geometry->record_stride_bytes;\n"
        "    return geometry->volume_bytes -",
        new="        return 0;\n    return 0 * geometry->volume_bytes + 0 *",
    ),
    Mutant(
        "no CRC",
        "a torn record passes",
        source="disk/pcc_format.c",
        old="if (record->crc32c != pcc_crc32c(0, record, offsetof(struct pcc_record, crc32c)))",
        new="if (0)",
    ),
    Mutant(
        "no CRC on persistent memory",
        "a record of old and new words passes",
        arguments=("--model", "pmem"),
        source="disk/pcc_format.c",
        old="if (record->crc32c != pcc_crc32c(0, record, offsetof(struct pcc_record, crc32c)))",
        new="if (0)",
    ),
    Mutant(
        "early free",
        "slots are free before the record without them is durable",
        source="disk/pcc_volume.c",
        old="        result = pcc_commit_staged(volume, on_durable, context);\n"
        "        if (result == 0)\n            free_dropped(volume, dropped);\n",
        new="        free_dropped(volume, dropped);\n"
        "        result = pcc_commit_staged(volume, on_durable, context);\n",
        seed="9",
    ),
    Mutant(
        "acknowledged before the record",
        "told durable, then written",
        source="disk/pcc_commit.c",
        old="    int result = write_replica(volume, 0);\n",
        new="    if (on_durable)\n        on_durable(context);\n    on_durable = NULL;\n"
        "    int result = write_replica(volume, 0);\n",
    ),
    Mutant(
        "oldest record wins",
        "recovery takes the first acceptable record",
        source="disk/pcc_commit.c",
        old="if (!search->any || search->buffer->record_number > found->record.record_number)",
        new="if (!search->any)",
    ),
    Mutant(
        "opening frees every slot",
        "checkpoints of before a restart are overwritten",
        source="disk/pcc_volume.c",
        old="if (entry->state == PCC_SLOT_FREE && (entry->flags &",
        new="if ((entry->flags &",
    ),
    Mutant(
        "published before the seal",
        "a snapshot whose copy was never vouched for",
        arguments=("--alone",),  # else it publishes while another record is being written
        source="disk/pcc_save_work.c",
        old="if (!save->sealed || save->written <",
        new="if (!save->handed_over || save->written <",
        seed="3",
    ),
    Mutant(
        "failed flush ignored",
        "published although the flush said EIO",
        source="disk/pcc_save_work.c",
        old="    if (result != 0) {\n        slot_error(save, result, PCC_STAGE_FLUSH);",
        new="    if (0) {",
        seed="10",
    ),
    Mutant(
        "failed flush concerns its own save only",
        "the next flush is clean and vouches for nothing",
        source="disk/pcc_save_work.c",
        old="const bool doubtful = PCC_READ(",
        new="const bool doubtful = 0 && PCC_READ(",
        seed="39",
    ),
    Mutant(
        "failed msync concerns its own save only",
        "it was told of another save's page",
        arguments=("--model", "mmap"),
        source="disk/pcc_save_work.c",
        old="const bool doubtful = PCC_READ(",
        new="const bool doubtful = 0 && PCC_READ(",
        seed="1",
    ),
    Mutant(
        "failed write ignored",
        "a chunk that never arrived counts as written",
        source="disk/pcc_save_work.c",
        old="    if (result == 0) {\n        if (save->has_base)",
        new="    if (1) {\n        if (save->has_base)",
        seed="1",
    ),
    Mutant(
        "short write taken for whole",
        "the rest of the transfer is not resumed",
        source="io/pcc_io.c",
        old="        length -= moved;\n",
        new="        length = 0;\n",
        seed="1",
    ),
    Mutant(
        "older overtakes newer",
        "the publisher does not ask who is newest",
        source="disk/pcc_volume.c",
        old="const enum pcc_published published = published_as(volume, entry);",
        new="(void)published_as;\n    const enum pcc_published published = PCC_PUBLISHED;",
    ),
    Mutant(
        "hidden record overwritten",
        "an opening that could not read the newest record goes on from the one before",
        program="fault_loop",
        source="disk/pcc_commit.c",
        old="if (found->unreadable[generation] == PCC_REPLICAS)",
        new="if (0)",
    ),
    Mutant(
        "given up, yet moved",
        "an abort between an error and the move is forgotten",
        program="fault_loop",
        source="disk/pcc_save_work.c",
        old="if (save->failed) /* given up after",
        new="if (0) /* given up after",
    ),
    Mutant(
        "bad slot reused",
        "a slot in which a write failed is free again",
        program="fault_loop",
        source="disk/pcc_save_work.c",
        old="if (save->has_slot && save->slot_bad) {",
        new="if (0) {",
    ),
    Mutant(
        "quarantine for ever",
        "after an outage no slot is left until the next opening",
        program="fault_loop",
        source="disk/pcc_volume.c",
        old="if (volume->free_slots == 0) reuse_quarantined(volume);",
        new="(void)reuse_quarantined;",
    ),
    Mutant(
        "nothing is repaired",
        "an opening leaves a record with one replica",
        source="disk/pcc_commit.c",
        old="if (found->good[replica])",
        new="if (1)",
    ),
    Mutant(
        "flag of one that goes",
        "a flag meets a slot that the record under way gives to nobody",
        source="disk/pcc_volume.c",
        old="result = find_sequence(&volume->staged, sequence, &staged_slot);",
        new="staged_slot = *slot_out;",
        seed="5",
    ),
    Mutant(
        "announced before it is written",
        "the owner re-uses memory that is not on the disk",
        source="disk/pcc_save_work.c",
        old="    const int result = write_changed(",
        new="    pcc_save_lock(save);\n    piece->state = PCC_SAVE_CHUNK_WRITTEN;\n"
        "    announce = !piece->announced;\n    piece->announced = true;\n"
        "    pcc_save_unlock(save);\n"
        "    if (announce)\n"
        "        saver->spec.events->chunk_written(saver->spec.owner, tag, piece->index);\n"
        "    announce = false;\n"
        "    const int result = write_changed(",
        seed="12",
    ),
    Mutant(
        "a base recycled",
        "a checkpoint that another one refers to is dropped like any other",
        source="disk/pcc_commit.c",
        old="uint32_t bases = in_use | pcc_record_bases(record, kept);",
        new="uint32_t bases = in_use;",
    ),
    Mutant(
        "read from its own slot",
        "what lies in the base is looked for beside what was written",
        source="disk/pcc_load.c",
        old="in_base ? load->base_offset_bytes : load->slot_offset_bytes",
        new="load->slot_offset_bytes",
    ),
    Mutant(
        "never referred to",
        "what was not written counts as written",
        source="disk/pcc_save_base.c",
        old="if (referred) bitmap[block / 64] |=",
        new="if (0) bitmap[block / 64] |=",
    ),
    Mutant(
        "sequence given out again",
        "after the daemon's death a new checkpoint takes that of one which went on",
        source="disk/pcc_save_adopt.c",
        old="(void)pcc_volume_take_sequence(saver->volume, found->entry.sequence);",
        new="(void)found;",
    ),
    Mutant(
        "durable, and saved again",
        "killed between the record and the end of the save, the next daemon continues it",
        source="disk/pcc_save_adopt.c",
        old="if (is_durable(saver->volume, found->entry.sequence))",
        new="(void)is_durable; if (0)",
    ),
    Mutant(
        "checksums not compared",
        "rotten data is handed out",
        program="rot",
        source="disk/pcc_load.c",
        old="return pcc_checksums_match(",
        new="return true || pcc_checksums_match(",
    ),
    Mutant(
        "single replica",
        "one rotten sector loses the newest record",
        program="rot",
        arguments=("--mutant", "no-replica"),
    ),
)


def mutated_source(mutant: Mutant, directory: Path) -> Path:
    """Writes the changed copy of the mutant's source; raises when a change no longer applies."""
    text = (CORE / mutant.source).read_text()
    for old, new in ((mutant.old, mutant.new), *mutant.also):
        words = re.findall(r"\w+|[^\w\s]", old)
        pattern = re.compile(r"\s*".join(re.escape(word) for word in words))
        found = pattern.findall(text)
        if len(found) != 1:
            raise SystemExit(
                f"mutant {mutant.name!r}: its text occurs {len(found)} times in "
                f"{mutant.source}, not once; adapt the mutant to the source:\n{old}"
            )
        text = pattern.sub(lambda _match, new=new: new, text)  # type: ignore[misc]
    changed = directory / Path(mutant.source).name
    changed.write_text(text)
    return changed


def compiled(command: Sequence[str]) -> None:
    """Runs the compiler, which optimizes nothing: most programs run once, and for a moment."""
    subprocess.run([*command, "-Wno-error", "-w", "-O0", "-g0"], cwd=HERE, check=True)


def build(mutant: Mutant, options: argparse.Namespace) -> str:
    """The program to run: the sound one, or one linked with the changed source."""
    if not mutant.source and mutant.program not in TESTS:
        return f"build/{mutant.program}"
    directory = HERE / "build" / "mutants" / mutant.name.replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    objects = options.core.split()
    if mutant.source:
        replaced = f"build/core/{Path(mutant.source).with_suffix('.o')}"
        if replaced not in objects:
            raise SystemExit(f"mutant {mutant.name!r}: {replaced} is not linked")
        objects[objects.index(replaced)] = str(mutated_source(mutant, directory))
    program = directory / mutant.program
    if mutant.program in TESTS:
        wraps = [f"-Wl,--wrap={name}" for name in TESTS[mutant.program]]
        sources = [*wraps, f"build/mutants/{mutant.program}.o"]
    else:
        sources = [*options.wrap.split(), f"build/{mutant.program}.o", *options.common.split()]
    compiled([*options.cc.split(), *sources, *objects, "-o", str(program)])
    return str(program)


def main() -> int:
    """Builds and runs every mutant; 0 when all were killed."""
    parser = argparse.ArgumentParser()
    for name in ("cc", "wrap", "common", "core"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    survived = 0
    chosen = [mutant for mutant in (*MUTANTS, *NATIVE_MUTANTS) if options.only in mutant.name]
    (HERE / "build" / "mutants").mkdir(exist_ok=True)
    for program in {mutant.program for mutant in chosen} & TESTS.keys():
        source = ('-DFORMAT_MD="../../native/FORMAT.md"', "-c", str(NATIVE / f"{program}.c"))
        compiled([*options.cc.split(), *source, "-o", f"build/mutants/{program}.o"])
        sound = build(Mutant(f"sound {program}", "", program), options)
        done = subprocess.run([sound], cwd=HERE, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"{program} fails without a mutant:\n{done.stdout}{done.stderr}")
    for mutant in chosen:
        is_test = mutant.program in TESTS
        command = [build(mutant, options), *(() if is_test else ("--killed",)), *mutant.arguments]
        tries = [(IMAGES[0], mutant.seed)] if mutant.seed else []
        for images, seed in (*tries, *itertools.product(IMAGES, SEEDS)):
            done = subprocess.run(
                [*command, "--images", images], cwd=HERE, env=os.environ | {"PCC_SEED": seed},
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            asserted = done.returncode == -signal.SIGABRT and "broken invariant" in done.stderr
            killed = (done.returncode == 0) != is_test or asserted
            if killed or is_test:
                break
        survived += not killed
        print(f"  {'killed  ' if killed else 'SURVIVED'} {mutant.name}: {mutant.why}")
        last = done.stderr.splitlines()[0] if asserted else done.stdout.strip().split("\n")[-1]
        print(f"           {last or done.stderr.strip()}", flush=True)
    print(f"mutants: {len(chosen) - survived} mutants killed, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
