"""The holders that a reader has connected to, and which of their memory NIXL knows. Used by all fetch threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamo_trtllm.kv_transfer.nixl.bindings import NixlBindings, NixlOffer, guard_agent_of

PEER_LOADS = 1024  # NIXL keeps what it learned of a peer's memory until the peer is removed as a whole


@dataclass(slots=True)
class RemoteAgent:
    name: str
    known: set[bytes] = field(default_factory=set)  # memory of its offers
    fetches: int = 0
    broken: bool = False


class RemoteAgents:
    """A peer that failed is forgotten: the next fetch reconnects."""

    def __init__(self, vendor: NixlBindings) -> None:
        self._vendor = vendor
        self._met: dict[str, RemoteAgent] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._met)

    def knows(self, offer: NixlOffer) -> bool:
        """Whether it is met at once."""
        peer = self._met.get(offer.agent)
        return peer is not None and (not offer.memory or offer.memory in peer.known)

    @contextlib.contextmanager
    def met(self, offer: NixlOffer) -> Iterator[RemoteAgent]:
        """The offer's holder, connected, and the offer's memory made known."""
        agent = self._vendor.agent
        with self._lock:
            peer = self._met.get(offer.agent)
            if peer is None:
                agent.add_remote_agent(offer.connection)
                self._vendor.guard_agent.add_remote_agent(offer.guards)
                peer = self._met[offer.agent] = RemoteAgent(offer.agent)
            if offer.memory and offer.memory not in peer.known:
                agent.add_remote_agent(offer.memory)
                peer.known.add(offer.memory)
            peer.fetches += 1
        try:
            yield peer
        except self._vendor.errors:
            peer.broken = True
            raise
        finally:
            with self._lock:
                peer.fetches -= 1
                if peer.broken or (len(peer.known) >= PEER_LOADS and peer.fetches == 0):
                    self._forget(peer)

    def disconnect(self, peer: RemoteAgent) -> None:
        """Closes the connection to a peer, which also ends all that still moves over it."""
        with self._lock:
            peer.broken = True
            self._forget(peer)

    def _forget(self, peer: RemoteAgent) -> None:
        if self._met.get(peer.name) is peer:
            del self._met[peer.name]
            for agent, name in (
                (self._vendor.agent, peer.name),
                (self._vendor.guard_agent, guard_agent_of(peer.name)),
            ):
                with contextlib.suppress(*self._vendor.errors):
                    agent.remove_remote_agent(name)

    def close(self) -> None:
        for peer in list(self._met.values()):
            self.disconnect(peer)
