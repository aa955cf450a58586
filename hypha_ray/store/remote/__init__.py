"""File systems of other machines: how they are opened, and what their errors mean."""
