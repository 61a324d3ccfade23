"""The version that the stand-in plays, marked as one."""

from tensorrt_llm.standin.release import VERSION

__version__ = f"{VERSION}+standin"
