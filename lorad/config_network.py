"""Addresses on TCP, and who may reach them: a part of `config.py`.

Goes in: settings.  Comes out: nothing, or the rule that is broken; an address as host and port.
Opens no socket.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address

from lorad.config_sections import Inference, Metrics, Tcp
from lorad.config_tasks import Need


def check_metrics(metrics: Metrics, need: Need) -> None:
    need(metrics.adapter_labels >= 0, "metrics.adapter_labels", "0 or more")
    if not metrics.tcp:
        return
    try:
        host, _ = split_address(metrics.tcp)
    except ValueError as error:
        need(False, "metrics.tcp", f'{error}, such as "127.0.0.1:9411"')
        return
    need(
        metrics.beyond_loopback or ip_address(host).is_loopback,
        "metrics.tcp",
        f"{host} can be reached from other machines, and nobody there is asked who they are",
        "metrics.beyond_loopback = true, if they may all read the names of your adapters",
    )


def check_tcp(tcp: Tcp, inference: Inference, need: Need) -> None:
    if not tcp.enabled:
        return
    beyond = not _address(tcp.bind, "tcp.bind", need).is_loopback
    need(
        not beyond or bool(tcp.api_keys_file) or inference.auth == "key",
        "tcp.bind",
        f"{tcp.bind} can be reached from other machines, and there are no keys",
        'tcp.api_keys_file = "/etc/lorad/secrets/api-keys", or inference.auth = "key" for tenants',
    )
    if tcp.admin_bind:
        _address(tcp.admin_bind, "tcp.admin_bind", need)
        need(
            bool(tcp.admin_keys_file),
            "tcp.admin_bind",
            "over TCP everybody would be an operator: there are no keys",
            'tcp.admin_keys_file = "/etc/lorad/secrets/admin-keys"',
        )


def _address(address: str, key: str, need: Need) -> IPv4Address | IPv6Address:
    try:
        return ip_address(split_address(address)[0])
    except ValueError as error:
        need(False, key, f'{error}, such as "127.0.0.1:8411"')
        raise


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:9411` or `[::1]:9411` as host and port; ValueError otherwise."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError("an IP address and a port")
    try:
        parsed = ip_address(bare)
    except ValueError:
        raise ValueError("an IP address and a port") from None
    if (parsed.version == 6) != (bare != host):
        raise ValueError("an IP address and a port, with brackets around IPv6")
    return bare, int(port)
