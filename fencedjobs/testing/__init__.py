"""The verification kit: an oracle, machines that compare a store with it, and faults they must catch."""
