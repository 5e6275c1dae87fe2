"""The operations of a run, one JSON object a line: schema, writer, reader. Standard library only."""

from .reader import Recording, TimelineError, read
from .schema import KINDS, LANES, SCHEMA
from .writer import Timeline

__all__ = ["KINDS", "LANES", "SCHEMA", "Recording", "Timeline", "TimelineError", "read"]
