"""What a text must look like: from a JSON schema, a regular expression or a list of choices to an automaton over bytes. Host code: it
knows no device. It may import `text`, `checks` and what lies beside that; `outlines_core` is imported where an automaton is built."""

from jaxspec.structured.params import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
