"""The draft/verify loop: pure functions of (weights, state), to be jitted, donated and sharded by the caller. It knows no host and no mesh,
and may import drafters, models, sampling and what lies below them."""

from jaxspec.decode.prompts import prefill, score
from jaxspec.decode.round import Round
from jaxspec.decode.state import (
    EMPTY,
    FAILED,
    FULL_LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
    Report,
    Requests,
    admit,
    fork,
    init_state,
    release,
    report,
)
from jaxspec.decode.step import decode_loop, spec_step

__all__ = [
    "EMPTY",
    "FAILED",
    "FULL_LENGTH",
    "RUNNING",
    "STOPPED",
    "DecodeState",
    "Report",
    "Requests",
    "Round",
    "admit",
    "decode_loop",
    "fork",
    "init_state",
    "prefill",
    "release",
    "report",
    "score",
    "spec_step",
]
