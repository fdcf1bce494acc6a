"""Broken protocols that no crash tells of, and the native tests that catch them."""

from __future__ import annotations

from pathlib import Path

from mutant import Mutant

NATIVE = Path(__file__).parents[1] / "native"
#: The tests, and what of the kernel passes through them.
TESTS = {
    "test_volume": (),
    "test_format": (),
    "test_save": ("nanosleep",),
    "test_base": (),
    "test_calls": (
        "open", "fallocate", "renameat2", "pread", "pwrite", "pwritev2", "fdatasync", "fsync",
    ),
}  # fmt: skip

NATIVE_MUTANTS = (
    Mutant(
        "a kept one for a bad slot",
        "an outage costs the older kept checkpoint",
        program="test_volume",
        source="disk/pcc_commit.c",
        old="while ((uint32_t)__builtin_popcount(kept | bases) >= record->slot_count) {",
        new="uint32_t usable = 0;\n"
        "for (uint32_t i = 0; i < record->slot_count; i++)\n"
        "    usable += (record->slots[i].flags & PCC_SLOT_QUARANTINED) == 0;\n"
        "while ((uint32_t)__builtin_popcount(kept | bases) >= usable) {",
    ),
    Mutant(
        "a lost record is forgotten",
        "recovery goes back to an older checkpoint, and nothing says so",
        program="test_volume",
        source="disk/pcc_volume.c",
        old="volume->staged.record_lost |= found.record_lost;",
        new="",
    ),
    Mutant(
        "damaged ones count as newest",
        "the only good one is thrown away for them",
        program="test_volume",
        source="disk/pcc_commit.c",
        old="(entry->flags & PCC_SLOT_DAMAGED) == 0 && entry->sequence > newest)",
        new="entry->sequence > newest)",
    ),
    Mutant(
        "a chunk in doubt re-used",
        "what has to be written again is gone from memory",
        program="test_save",
        source="disk/pcc_save.c",
        old="|| save->slot_failed || save->slot_doubtful)",
        new="|| save->slot_failed)",
    ),
    Mutant(
        "flushes side by side",
        "a clean one ends before the failed one is known",
        program="test_save",
        source="disk/pcc_save_work.c",
        old="(void)pthread_mutex_lock(&saver->flushing);",
        new="",
        also=(("(void)pthread_mutex_unlock(&saver->flushing);", ""),),
    ),
    Mutant(
        "published with a damaged base",
        "what was just called damaged is the newest checkpoint",
        program="test_base",
        source="disk/pcc_volume.c",
        old="if (entry->base_sequence != 0 && !is_sound_base(volume, entry->base_sequence))",
        new="if (0)",
    ),
    Mutant(
        "a reader without the base",
        "what it refers to is overwritten while it reads",
        program="test_base",
        source="disk/pcc_volume.c",
        old="hold(volume, out->base.slot, &out->base.entry);",
        new="out->base.entry = out->entry;",
        also=(("release(volume, held->base.slot);", "(void)held;"),),
    ),
    Mutant(
        "a base of saves in flight recycled",
        "it is gone before the record that needs it",
        program="test_base",
        source="disk/pcc_volume.c",
        old="volume->references[slot]++;",
        new="",
        also=(
            ("volume->references[base->slot]--;", ""),
            ("PCC_ASSERT(volume->references[base->slot] > 0);", ""),
        ),
    ),
    Mutant(
        "a poor base for ever",
        "each checkpoint writes most of what was called frozen",
        program="test_base",
        source="disk/pcc_volume.c",
        old="volume->base.poor = sequence;",
        new="(void)sequence;",
    ),
    Mutant(
        "a merge written for ever",
        "each checkpoint writes what has changed once since its base",
        program="test_base",
        source="disk/pcc_volume.c",
        old="volume->base.wasted_bytes += missed_bytes;",
        new="",
    ),
    Mutant(
        "no patience with a base",
        "what changes each time makes one in a few checkpoints whole",
        program="test_base",
        source="disk/pcc_volume.c",
        old="volume->base.patience *= 2;",
        new="",
    ),
    Mutant(
        "read back from its own slot",
        "the next daemon looks for what lies in the base beside what was written",
        program="test_base",
        source="disk/pcc_save_adopt.c",
        old="in_base ? save->base.slot : save->slot",
        new="save->slot",
    ),
    Mutant(
        "an offer believed",
        "what has changed is taken for what the base has",
        program="test_base",
        source="disk/pcc_save_work.c",
        old="&in_base) == end_bytes && in_base;",
        new="&in_base) == end_bytes;",
    ),
    Mutant(
        "rescued without a look",
        "what was not copied is taken from a damaged base",
        program="test_base",
        source="disk/pcc_save_base.c",
        old="result = -PCC_E_DAMAGED;",
        new="result = 0;",
    ),
    Mutant(
        "records are no chain",
        "a lost write between two records is not seen",
        program="test_volume",
        source="disk/pcc_commit.c",
        old="next->previous_hash = pcc_hash_bytes(&volume->durable, sizeof volume->durable);",
        new="next->previous_hash = 0;",
    ),
    Mutant(
        "a record's own place ignored",
        "a record that says that it lies elsewhere passes",
        program="test_format",
        source="disk/pcc_format.c",
        old="record->offset_bytes != offset_bytes ||",
        new="",
    ),
    Mutant(
        "records without RWF_DSYNC",
        "acknowledged while it is in the cache",
        program="test_calls",
        source="io/pcc_io_pwrite.c",
        old="RWF_DSYNC);",
        new="0);",
    ),
    Mutant(
        "flush without fdatasync",
        "the record overtakes its data",
        program="test_calls",
        source="io/pcc_io_pwrite.c",
        old="return fdatasync(fd) == 0 ? 0 : -errno;",
        new="return fd >= 0 ? 0 : -errno;",
    ),
    Mutant(
        "opened without fsync",
        "a record is believed that a power cut takes back",
        program="test_calls",
        source="disk/pcc_volume_file.c",
        old="if (fsync(fd) == 0) return 0;",
        new="if (fd >= 0) return 0;",
    ),
    Mutant(
        "made without fsync",
        "the volume has a name before it has its extents",
        program="test_calls",
        source="disk/pcc_volume_file.c",
        old="if (result == 0 && fsync(fd) != 0)",
        new="if (result == 0 && fd < 0)",
    ),
    Mutant(
        "directory without fsync",
        "a volume that was made has no name after a power cut",
        program="test_calls",
        source="disk/pcc_volume_file.c",
        old="const int result = fsync(fd) == 0 ? 0 : -errno;",
        new="const int result = fd < 0;",
    ),
)
