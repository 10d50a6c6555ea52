"""The story of the late courier, with real processes; each invariant is read from the database."""
