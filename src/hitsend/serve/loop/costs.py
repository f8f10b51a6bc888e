"""What it costs here to save a sequence and to compute it again.

Enters: seconds, as measured on the way. Leaves: which of both is cheaper. Always true: before anything was measured,
saving is (it is a thousandth of computing on every machine that we know). Next: `seats.py`.
"""

_SAVE_S_PER_BYTE = 1e-9
_COMPUTE_S_PER_TOKEN = 1e-3
_BYTES_PER_TOKEN = 100_000.0
"""What is assumed until it was measured."""


class Costs:
    """What saving and computing cost here, as measured: seconds per byte and per token, bytes per token."""

    def __init__(self) -> None:
        self.save_s_per_byte = _SAVE_S_PER_BYTE
        self.compute_s_per_token = _COMPUTE_S_PER_TOKEN
        self.bytes_per_token = _BYTES_PER_TOKEN

    def saved(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """So long did it take."""
        if num_tokens and num_bytes:
            self.bytes_per_token = num_bytes / num_tokens
            self.save_s_per_byte += (seconds / num_bytes - self.save_s_per_byte) / 8

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of nothing but prompts."""
        if num_tokens:
            self.compute_s_per_token += (seconds / num_tokens - self.compute_s_per_token) / 8

    @property
    def is_saving_cheaper(self) -> bool:
        """Saving and restoring against computing again."""
        return 2 * self.save_s_per_byte * self.bytes_per_token <= self.compute_s_per_token
