"""The auction: sharing of a cluster's room among competing runs."""

from __future__ import annotations
