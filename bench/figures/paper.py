"""What the paper and its artefact (github.com/eth-easl/pccheck) say: models, disk, link, figures.

Two numbers of a model decide how much checkpoints cost: the bytes of a checkpoint on one machine,
and the time of a step. Their ratio, the steps that one checkpoint needs to reach the disk, stays
the same when bytes and disk are scaled down; `scaled` then gives the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9

#: Bytes a second of the paper's disk, a pd-ssd of 1 TB. Not printed: at VGG16, f = 10, the
#: artefact's PCcheck waits for nothing but the disk, and writes 1.107 GB in 10 / 6.35 s
#: (fig8_vgg16.csv). OPT-2.7B at f = 10 gives 0.74 GB/s (fig8_opt27.csv).
DISK = 0.70 * GB
#: Between the machines, as the paper measured it: 15 Gbit/s. Only Gemini uses it.
LINK = 15e9 / 8
#: Between two samples of the spot trace.
TRACE_STEP_S = 63.0


@dataclass(frozen=True, slots=True)
class Model:
    """Table 3 of the paper, and the time of a step, which the paper does not print."""

    name: str
    checkpoint_bytes: float
    machines: int
    step_s: float
    step_source: str
    #: Seconds to load a checkpoint, where the artefact has them.
    load_s: float | None = None

    @property
    def machine_bytes(self) -> float:
        return self.checkpoint_bytes / self.machines

    @property
    def ratio(self) -> float:
        """Steps during which the paper's disk writes one checkpoint: m / (t T_S)."""
        return self.machine_bytes / (self.step_s * DISK)

    def scaled(self, payload_bytes: int, disk: float) -> float:
        """Seconds of a step with the same ratio, for a smaller checkpoint and another disk."""
        return payload_bytes / (self.ratio * disk)


MODELS = {
    "vgg16": Model(
        "VGG16", 1.1 * GB, 1, 0.0634, "artefact, fig8_vgg16.csv: 15.77 iterations a second", 0.837
    ),
    "transformerxl": Model(
        "TransformerXL", 2.7 * GB, 1, 0.30,
        "assumed: not printed; its arithmetic at OPT-1.3B's 16 TFLOP/s", 2.15,
    ),
    "bert": Model(
        "BERT", 4.0 * GB, 1, 0.15,
        "assumed: not printed; 340 M parameters, 3 x 384 tokens, at OPT-1.3B's 16 TFLOP/s", 3.0,
    ),
    "opt-1.3b": Model(
        "OPT-1.3B", 16.2 * GB, 1, 0.50,
        "derived: at f = 50 the paper has 1.02 for PCcheck, so 50 steps take 23 s, a checkpoint's "
        "time on the disk, or longer, and 1.17 for CheckFreq, so hardly longer", 12.6,
    ),
    "opt-2.7b": Model(
        "OPT-2.7B", 45.0 * GB, 2, 2.458,
        "artefact, fig8_opt27.csv: 0.407 iterations a second, on two machines",
    ),
    "bloom-7b": Model(
        "BLOOM-7B", 108.0 * GB, 6, 1.97,
        "derived: Gemini's slowdown of 1.65 at f = 10, with the 0.71 s that the artefact's Gemini "
        "takes for each GB of OPT-2.7B; six machines",
    ),
}  # fmt: skip

_VGG = "artefact, fig8_vgg16.csv"
_OPT = "artefact, fig8_opt27.csv"
_TEXT = "the paper's text, quoted second-hand"
#: PCcheck's highest goodput over that of another contender (Figure 9).
GAINS = {"CheckFreq": 2.86, "GPM": 1.75, "Gemini": 2.75}
#: (model, contender of the paper, interval) -> slowdown and where it stands.
PRINTED: dict[tuple[str, str, int], tuple[float, str]] = {
    ("vgg16", "CheckFreq", 10): (15.743 / 2.939, _VGG),
    ("vgg16", "CheckFreq", 25): (15.743 / 7.042, _VGG),
    ("vgg16", "CheckFreq", 50): (15.743 / 12.187, _VGG),
    ("vgg16", "GPM", 10): (15.756 / 6.651, _VGG),
    ("vgg16", "GPM", 25): (15.756 / 10.388, _VGG),
    ("vgg16", "GPM", 50): (15.756 / 12.998, _VGG),
    ("vgg16", "PCcheck", 10): (15.769 / 6.350, _VGG),
    ("vgg16", "PCcheck", 25): (15.769 / 14.273, _VGG),
    ("vgg16", "PCcheck", 50): (15.769 / 15.526, _VGG),
    ("opt-2.7b", "CheckFreq", 10): (0.4067 / 0.2529, _OPT),
    ("opt-2.7b", "GPM", 10): (0.3816 / 0.2602, _OPT),
    ("opt-2.7b", "Gemini", 10): (0.4071 / 0.2459, _OPT),
    ("opt-2.7b", "PCcheck", 10): (0.4069 / 0.3294, _OPT),
    ("opt-2.7b", "Gemini", 100): (1.06, _TEXT),
    ("opt-1.3b", "PCcheck", 50): (1.02, _TEXT),
    ("opt-1.3b", "GPM", 50): (1.9, _TEXT),
    ("opt-1.3b", "CheckFreq", 50): (1.17, _TEXT),
    ("bloom-7b", "Gemini", 10): (1.65, _TEXT),
    ("bloom-7b", "Gemini", 100): (1.08, _TEXT),
}
