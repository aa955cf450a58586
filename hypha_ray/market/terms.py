"""Terms on which a node's owner lets it: labels of the node, and what was posted later with ``jobs/market.py``.

Prices are per hour of the whole node, in any unit that all owners and jobs of a cluster agree on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hypha_ray.config.value_types import NotNegative, Positive
from hypha_ray.errors import ConfigError

Role = Literal["worker", "server"]
SITE = "site"


def _roles(text: object) -> object:
    """Roles of a label's value, such as ``worker_server``; a label can't have a comma."""
    return [role for role in text.split("_") if role != "none"] if isinstance(text, str) else text


class Terms(BaseModel):
    """Terms of one node."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    price: NotNegative = Field(0.0, description="price of the whole node per hour")
    floor: NotNegative = Field(0.0, description="lowest bid for the whole node per hour")
    offer: Literal["flexible", "whole"] = Field("flexible", description="whole: one lease has all of the node")
    accepts: Annotated[frozenset[Role], BeforeValidator(_roles)] = Field(
        frozenset(("worker", "server")), description="roles: worker, server, worker_server or none"
    )
    max_lease_s: Annotated[float, Field(ge=0)] = Field(math.inf, description="longest lease in seconds; 0: none")
    throughput: Positive | None = Field(None, description="speed of the whole node, in a unit that all owners use")
    site: str | None = Field(None, description="place of the node")

    @property
    def named_price(self) -> bool:
        """Whether the owner has named a price, which may be 0."""
        return "price" in self.model_fields_set


PRICING = frozenset(Terms.model_fields) - {SITE}
"""Labels that are terms and nothing else; a site is a place even if no owner has terms."""


def are_posted(labels: Mapping[str, str]) -> bool:
    """Whether a node's labels have terms."""
    return not PRICING.isdisjoint(labels)


def require_terms(labels: Mapping[str, str]) -> None:
    """Check terms that an owner is about to post.

    Raises:
        ConfigError: CFG003, one of them is out of range.

    """
    terms = read_terms(labels)
    if isinstance(terms, str):
        raise ConfigError("CFG003", "the terms are out of range", terms, "numbers ≥ 0 and known roles", "see --help")


def read_terms(labels: Mapping[str, str]) -> Terms | str:
    """Terms that a node's labels state; the first label that can't be used, if there is one."""
    try:
        return Terms.model_validate(labels)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{first['loc'][0]} = {first['input']}"
