"""The parameter server: a reducer over immutable objects."""
