"""The bookkeeping of a pass: where its tokens stand, and what the slots grew by."""

from .api import advance, lay_out
from .base import Advanced, Grown, Layout, Pace, Sent, Slots

__all__ = ["Advanced", "Grown", "Layout", "Pace", "Sent", "Slots", "advance", "lay_out"]
