"""The revisions, frozen: none of them is derived from today's models."""
