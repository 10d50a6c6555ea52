"""Measurements as ratios within one run; see docs/performance.md."""
