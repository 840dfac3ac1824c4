# SPDX-License-Identifier: Apache-2.0
"""The settings of engines that hand each other pages: keys of kv_connector_extra_config.

Which of them an engine needs follows from its kv_role: a producer prefills, and others get its
pages; a consumer asks producers for pages, and decodes; kv_both may do either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.settings import secret_file

#: Memory of the outbox where the user says nothing: a 16th of the machine's, and no more than
#: takes 32,768 tokens of an 8B model with 16-bit K/V of 8 heads (131,072 bytes each).
_DEFAULT_SHARE, _DEFAULT_MOST = 16, 4 << 30


@dataclass(frozen=True)
class PeerConfig:
    """What of an engine's settings is about its peers."""

    listen: Address | None  # where peers ask for pages; None: nobody may
    peers: tuple[Address, ...]  # whom to ask for pages
    secret: Path | None  # file of what all of them share; None: they are on this machine
    outbox_bytes: int  # most memory of pages that peers may ask for

    @staticmethod
    def of(given: Mapping[str, Any]) -> PeerConfig | None:
        """Of values that were read; None: there are no peers."""
        if "listen" not in given and not given.get("peers"):
            return None
        most = given.get("outbox_bytes")
        if most is None:
            most = min(psutil.virtual_memory().total // _DEFAULT_SHARE, _DEFAULT_MOST)
        listen, peers = given.get("listen"), tuple(given.get("peers", ()))
        return PeerConfig(listen, peers, given.get("secret"), most if listen is not None else 0)

    def read_secret(self) -> bytes:
        """The secret; empty where there is none.

        Raises:
            ValueError: its file cannot be used.
        """
        return b"" if self.secret is None else secret_file.read(self.secret, "secret")

    def settled(self) -> dict[str, Any]:
        """The same as JSON has it."""
        settled: dict[str, Any] = {"peers": [str(peer) for peer in self.peers]}
        if self.listen is not None:
            settled |= {"listen": str(self.listen), "outbox_bytes": self.outbox_bytes}
        if self.secret is not None:
            settled["secret"] = str(self.secret)
        return {key: value for key, value in settled.items() if value != []}


def check(role: str, given: Mapping[str, Any], where: str) -> None:
    """Checks values that were read against each other.

    Args:
        role: kv_role.
        given: values by key.
        where: the option, for messages.

    Raises:
        ValueError: a key is missing or of no use; or an address is not this machine's, and there is
            no secret; or its file cannot be used.
    """
    needed, useless = {
        "kv_producer": ("listen", "peers"),
        "kv_consumer": ("peers", "listen"),
        "kv_both": (None, None),
    }[role]
    if needed is not None and not (given.get(needed) or "path" in given):
        meaning = {
            "listen": "the address where decoding engines ask for K/V, such as 127.0.0.1:9100",
            "peers": "the addresses that prefilling engines listen on, such as ['127.0.0.1:9100']",
        }[needed]
        raise ValueError(
            f"kv_role {role!r} needs {where} {needed!r}, {meaning}; or 'path', a folder that both "
            "share"
        )
    if useless is not None and given.get(useless):
        raise ValueError(
            f"kv_role {role!r} has no use for {where} {useless!r}: leave it out, or choose kv_both"
        )
    if "outbox_bytes" in given and "listen" not in given:
        raise ValueError(f"{where} 'outbox_bytes' needs 'listen': the outbox is for peers that ask")
    config = PeerConfig.of(given)
    if config is None:
        if "secret" in given:
            raise ValueError(f"{where} 'secret' needs 'listen' or 'peers', whom it is shared with")
        return
    listens = () if config.listen is None else (config.listen,)
    elsewhere = [str(each) for each in (*listens, *config.peers) if not each.is_loopback]
    if elsewhere and config.secret is None:
        raise ValueError(
            f"{where} names {', '.join(elsewhere)}, beyond this machine: whoever reaches that port "
            "could read prompts out of K/V, or plant K/V that change answers. Give 'secret', a "
            "file with the same content on all machines: `openssl rand -hex 32 > FILE && chmod "
            "600 FILE`"
        )
    config.read_secret()


def address(value: Any) -> Address:
    """An address.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"must be an address such as '127.0.0.1:9100', not {value!r}")
    return Address.parse(value)


def addresses(value: Any) -> tuple[Address, ...]:
    """Several addresses, no two the same.

    Raises:
        ValueError: it is no list of addresses.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of addresses such as ['127.0.0.1:9100'], not {value!r}")
    found = [address(each) for each in value]
    if len(set(found)) < len(found):
        raise ValueError("names an address twice")
    return tuple(found)
