"""The code and the recipe of docs/how-to/own_code.md as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/own_code.md").read_text()
_CODE, *_ = re.findall(r"```python\n# the module delays\n(.*?)```", PAGE, re.DOTALL)
_BLOCKS: dict[str, Any] = yaml.safe_load(
    re.findall(r"```yaml\n(model:\n.*?)```", PAGE, re.DOTALL)[0].replace("delays:", f"{__name__}:")
)
exec(_CODE, globals())
RECIPE = ["optim.warmup_steps=0"] + [
    f"{block}.{key}={json.dumps(value)}" for block, keys in _BLOCKS.items() for key, value in keys.items()
]
