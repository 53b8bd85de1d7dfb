"""Ratios on this machine: what the component costs, beside the hardware's limit and torch's own ways, in one run."""
