"""config.json of the released models and their assistants under the names that they are known by, with the sizes that their
checkpoints have."""

from __future__ import annotations

import copy
import json
from typing import Any

from jaxspec import released as shapes
from jaxspec.model.layer_spec import FULL, SLIDING

NAMES = {"E2B": "e2b", "E4B": "e4b", "12B": "12b", "26B-A4B": "26b", "31B": "31b"}
TARGETS = {name: shapes.TARGETS[key] for name, key in NAMES.items()}
ASSISTANTS = {name: shapes.drafter_config("mtp", key) for name, key in NAMES.items()}

# Parameters of the text part, the tied head counted once, without the dead K and V weights that some releases keep.
TARGET_PARAMETERS = {
    "E2B": 4_628_569_379,
    "E4B": 7_463_013_418,
    "12B": 11_907_350_320,
    "26B-A4B": 25_233_141_790,
    "31B": 30_697_345_340,
}

# Elements of all tensors, token_ordering's 262,144 ids included.
ASSISTANT_ELEMENTS = {"E2B": 77_993_476, "E4B": 78_779_908, "12B": 422_856_964, "26B-A4B": 419_711_236, "31B": 469_518_596}
ASSISTANT_TENSORS = {"E2B": 50, "E4B": 50, "12B": 48, "26B-A4B": 48, "31B": 48}

# Bytes of bfloat16 K and V that one position takes, over all layers of a kind that own them.
KV_BYTES = {
    "E2B": {SLIDING: 12_288, FULL: 6_144},
    "E4B": {SLIDING: 40_960, FULL: 16_384},
    "12B": {SLIDING: 327_680, FULL: 16_384},
    "26B-A4B": {SLIDING: 204_800, FULL: 20_480},
    "31B": {SLIDING: 819_200, FULL: 81_920},
}


def saved_again(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes when it saves what it read from this one."""
    from transformers import CONFIG_MAPPING

    return json.loads(CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)).to_json_string())
