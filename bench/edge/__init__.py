"""What the edge itself costs: gateways in front of one fast mock upstream. Start with `run.py`."""
