"""Choose the card of a model that frontends use, and decide which instances fit it.

The workers of a model have equal cards, but any client of etcd can write a record with another
card. So the card of most instances is chosen. If a model has two instances, a single other record
can't change the card, even if it is older. The module does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_trtllm.protocol.messages import Instance, ModelDeploymentCard, Role, encode

_TOKENIZER = "tokenizer.json"  # the name of the tokenizer in the files of a card


class CardKind(NamedTuple):
    """The values that must be equal in the cards of all instances.

    Frontends render requests with these values. Parsers, chat template and sampling defaults may
    differ, for example while a new release is rolled out.
    """

    vocab_size: int
    renderer: str
    tokenizer: str  # SHA-256 of the file of the tokenizer; "": the card has no tokenizer

    @classmethod
    def of(cls, card: ModelDeploymentCard) -> CardKind:
        """Return the kind of a card."""
        return cls(card.vocab_size, card.renderer, card.files.get(_TOKENIZER, ""))


class ChosenCard(NamedTuple):
    """The card that frontends use for a model, and its requirements for instances."""

    card: ModelDeploymentCard
    kind: CardKind
    # Decode and aggregated instances must have at least this context length.
    min_context_length: int

    def requires_same(self, other: ChosenCard) -> bool:
        """Return whether another chosen card has the same requirements."""
        return (self.kind, self.min_context_length) == (other.kind, other.min_context_length)

    def mismatch(self, instance: Instance) -> str:
        """Return why the card of an instance of this model does not fit, or "" if it fits.

        The context length of prefill workers may be shorter, because they reject prompts that are
        too long for them.
        """
        card = instance.card
        kind = CardKind.of(card)
        for field, own, chosen in zip(CardKind._fields, kind, self.kind, strict=True):
            if own != chosen:
                name = f"files.{_TOKENIZER}" if field == "tokenizer" else field
                return _mismatch(name, own or "missing", chosen or "missing")
        is_too_short = card.context_length < self.min_context_length
        if is_too_short and instance.role is not Role.PREFILL:
            return _mismatch("context_length", card.context_length, self.min_context_length)
        return ""


def _mismatch(field: str, own: object, chosen: object) -> str:
    return (
        f"card.{field} is {own}, and {chosen} in the card in use, which most instances of the model"
        " have; start all workers of a model with the same files and flags, or with another"
        " --served-model-name"
    )


class _Votes:
    """The instances that have the same card, or the same kind of card.

    The dicts have the number of the last write of each record, by key. They are in the order of
    these writes.
    """

    def __init__(self) -> None:
        self.all: dict[str, int] = {}
        self.decode: dict[str, int] = {}  # only decode and aggregated instances

    @property
    def first_write(self) -> int:
        """The number of the oldest write, of decode and aggregated instances if there are some."""
        numbers = self.decode or self.all
        return next(iter(numbers.values()))


class _CardsOfKind:
    """The cards of one kind."""

    def __init__(self) -> None:
        self.votes = _Votes()
        # Cards and their votes, by the encoding of the card.
        self.cards: dict[bytes, tuple[ModelDeploymentCard, _Votes]] = {}


class ModelCards:
    """The cards of the instances of one model.

    First, the kind of card is chosen that most instances have. Then one of its cards is chosen.
    Cards of decode or aggregated instances come first, because their context length limits prompt
    and output. Of these, the card is chosen that most instances have.

    If several kinds or cards have equally many instances, the last choice stays. If there is no
    last choice, the kind or card is chosen whose oldest record was written first.
    """

    def __init__(self) -> None:
        # Instances by key, in the order in which their records were written.
        self.instances: dict[str, Instance] = {}
        self.chosen: ChosenCard | None = None
        self._kinds: dict[CardKind, _CardsOfKind] = {}
        # The last choice. None: nothing was chosen yet, or the choice has no instances any more.
        self._last_kind: CardKind | None = None
        self._last_card: bytes | None = None

    def put(self, key: str, instance: Instance, number: int) -> None:
        """Add an instance whose record was just written. `number` is the number of the write."""
        self.discard(key)
        self.instances[key] = instance
        of_kind = self._kinds.setdefault(CardKind.of(instance.card), _CardsOfKind())
        _, votes = of_kind.cards.setdefault(encode(instance.card), (instance.card, _Votes()))
        for voters in (of_kind.votes, votes):
            voters.all[key] = number
            if instance.role is not Role.PREFILL:
                voters.decode[key] = number

    def discard(self, key: str) -> None:
        """Remove an instance, if the model has it."""
        instance = self.instances.pop(key, None)
        if instance is None:
            return
        kind = CardKind.of(instance.card)
        encoded = encode(instance.card)
        of_kind = self._kinds[kind]
        _, votes = of_kind.cards[encoded]
        for voters in (of_kind.votes, votes):
            del voters.all[key]
            voters.decode.pop(key, None)
        if not votes.all:
            del of_kind.cards[encoded]
            if encoded == self._last_card:
                self._last_card = None
        if not of_kind.votes.all:
            del self._kinds[kind]
            if kind == self._last_kind:
                self._last_kind = None

    def choose(self) -> ChosenCard:
        """Choose the card again. The model must have an instance."""
        kind = max(self._kinds, key=self._rank_of_kind)
        cards = self._kinds[kind].cards

        def rank(encoded: bytes) -> tuple[bool, int, bool, int]:
            _, votes = cards[encoded]
            is_last_choice = encoded == self._last_card
            return bool(votes.decode), len(votes.all), is_last_choice, -votes.first_write

        chosen = max(cards, key=rank)
        card, votes = cards[chosen]
        min_context_length = card.context_length if votes.decode else 0
        self._last_kind = kind
        self._last_card = chosen
        self.chosen = ChosenCard(card, kind, min_context_length)
        return self.chosen

    def _rank_of_kind(self, kind: CardKind) -> tuple[int, bool, int]:
        votes = self._kinds[kind].votes
        return len(votes.all), kind == self._last_kind, -votes.first_write
