"""The bridge: how a trainer that is no part of Ray takes part in a job. Needs neither ray nor torch."""
