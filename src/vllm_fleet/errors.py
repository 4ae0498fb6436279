"""What the planner raises: one paragraph for a person, and every reason behind it."""


class PlanError(Exception):
    """A request that cannot become a plan.

    Attributes:
        reasons: Every reason, one sentence each; the message is the paragraph that sums them up.
    """

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        """Keep the paragraph as the message and the reasons beside it."""
        super().__init__(message)
        self.reasons = reasons


class BadInputError(PlanError):
    """The topology, the card or an option says something impossible."""


class NoFeasibleLayoutError(PlanError):
    """The input is sound, and no layout of this model fits this host."""
