"""Write the presets and GPUs that the calculator offers, from the tables of the package.

    python docs/tools/explorables_data.py

What is written, docs/explorables/data.js, is committed; a test holds it to the tables.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "explorables" / "data.js"

# Memory of one GPU in units of 10^9 bytes, from the datasheets named in mla.roofline.GPUS.
MEMORY = {
    "a100-80g": 80, "h100-sxm": 80, "h200": 141, "b200": 180, "l40s": 48, "mi300x": 192, "mi355x": 288,
    "h200-measured": 141,
}  # fmt: skip


def script() -> str:
    """Return the module that exports PRESETS, by name, and GPUS, a list; one entry a line."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from mla.presets import PRESETS, preset
    from mla.roofline import GPUS

    axes = ("H", "N", "Lq", "L", "P", "R", "V")
    configs = {name: preset(name) for name in PRESETS}
    models = {
        name: {**{axis: getattr(c, axis) for axis in axes}, "layers": c.num_hidden_layers, "beyond": c.unsupported}
        for name, c in configs.items()
    }
    gpus = [
        {"name": g.name, "flops": g.flops, "bandwidth": g.bandwidth, "itemsize": g.itemsize, "source": g.source}
        | {"memory": MEMORY[g.name]}
        for g in GPUS.values()
    ]
    return (
        "// Written by docs/tools/explorables_data.py: change that, not this.\n"
        "export const PRESETS = {\n"
        + "".join(f"  {json.dumps(name)}: {json.dumps(model)},\n" for name, model in models.items())
        + "};\nexport const GPUS = [\n"
        + "".join(f"  {json.dumps(gpu)},\n" for gpu in gpus)
        + "];\n"
    )


if __name__ == "__main__":
    FILE.write_text(script(), encoding="utf-8")
    print(FILE.relative_to(ROOT))
