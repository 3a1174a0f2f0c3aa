# SPDX-License-Identifier: Apache-2.0
"""The command resctrlmon-exporter: serve metrics to Prometheus, write them for node_exporter, or push by OTLP."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence

from resctrlmond import __version__
from resctrlmond.api import sockets
from resctrlmond.configuration import config
from resctrlmond.exporter import listening, metrics
from resctrlmond.exporter.collector import Exporter
from resctrlmond.exporter.otlp.ends import Ends
from resctrlmond.exporter.otlp.ledger import Ledger, Temporality
from resctrlmond.exporter.server import MAX_CONNECTIONS, Application, Room, Server
from resctrlmond.exporter.source import Source
from resctrlmond.exporter.textfile import NAME, Textfile
from resctrlmond.exporter.tls import expiries, server_context
from resctrlmond.service import journal
from resctrlmond.service.arguments import Parser, add_manager_socket, not_empty
from resctrlmond.service.notify import Notify

log = logging.getLogger("resctrlmond.exporter")

_Push = Callable[[Source, Mapping[str, metrics.EventMetrics]], int]

_STOPPING = {signal.SIGTERM, signal.SIGINT}
_MAX_S = 3600.0
_INTERVAL_S = 15.0
# As that of OpenTelemetry's SDK.
_PUSH_INTERVAL_S = 60.0
_PROTOCOLS = ("http/protobuf", "grpc")
_TEMPORALITY = Temporality.CUMULATIVE
# A receiver that does not answer delays the end of the process by this time at most.
_LAST_PUSH_S = 15.0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resctrlmon-exporter",
        description="Export what each workload and the whole machine used, for Prometheus or OpenTelemetry.",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="ADDRESS",
        help=f"HOST:PORT or the path of a unix socket, unless systemd passes a socket ({listening.DEFAULT})",
    )
    add_manager_socket(parser, config.Config().varlink_socket)
    parser.add_argument(
        "--event",
        action="append",
        type=_pattern,
        metavar="PATTERN",
        help=f"the events to export, as a pattern; can be repeated ({', '.join(metrics.DEFAULT_EVENTS)})",
    )
    parser.add_argument(
        "--names",
        action="append",
        type=_names,
        metavar="PROGRAM",
        help=f"whose names the figures have: {', '.join(metrics.Names)}; can be repeated "
        f"({', '.join(metrics.DEFAULT_NAMES)})",
    )
    parser.add_argument(
        "--node-name",
        type=not_empty,
        metavar="NAME",
        help="with --names nri-resctrl-mon: the name of this host in Kubernetes ($NODE_NAME, or the host name)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=8.0,
        metavar="SECONDS",
        help="how long a scrape waits for resctrlmond (%(default)s)",
    )
    parser.add_argument("--certfile", type=not_empty, metavar="PATH", help="serve over TLS, with this certificate")
    parser.add_argument("--keyfile", type=not_empty, metavar="PATH", help="the key of the certificate (in its file)")
    parser.add_argument(
        "--client-cafile", type=not_empty, metavar="PATH", help="require certificates of clients from this authority"
    )
    parser.add_argument(
        "--textfile", type=not_empty, metavar="DIR", help=f"write DIR/{NAME} for node_exporter, and do not listen"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        metavar="SECONDS",
        help=f"how often to write the file ({_INTERVAL_S}), or to push ({_PUSH_INTERVAL_S})",
    )
    parser.add_argument(
        "--otlp",
        nargs="?",
        const=False,
        type=_url,
        metavar="URL",
        help="push to this receiver of OTLP, and do not listen (that of OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    parser.add_argument(
        "--otlp-protocol",
        choices=_PROTOCOLS,
        help=f"with --otlp: the protocol (that of OTEL_EXPORTER_OTLP_PROTOCOL, or {_PROTOCOLS[0]})",
    )
    parser.add_argument(
        "--otlp-temporality",
        choices=list(Temporality),
        help=f"with --otlp: whether a point has the use since the start or since the last push ({_TEMPORALITY})",
    )
    parser.add_argument(
        "--otlp-state",
        type=not_empty,
        metavar="PATH",
        help="with --otlp: keep what was pushed in this file, over restarts",
    )
    parser.add_argument("--log-level", choices=journal.LEVELS, default="info", help="(%(default)s)")
    parser.add_argument("--version", action="version", version=f"resctrlmon-exporter {__version__}")
    return parser


def _node_name() -> str:
    """Return the name that a pod gets from Kubernetes, or else the one that kubelet derives from the host's name."""
    return os.environ.get("NODE_NAME") or os.uname().nodename.lower()


def _address(text: str) -> listening.Address:
    try:
        return listening.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pattern(text: str) -> str:
    if not metrics.selected([text]):
        raise argparse.ArgumentTypeError(f"no event matches {text!r}; they are: {', '.join(metrics.EVENT_METRICS)}")
    return text


def _names(text: str) -> metrics.Names:
    try:
        return metrics.Names(text)
    except ValueError:
        known = ", ".join(metrics.Names)
        raise argparse.ArgumentTypeError(f"{text!r} is none of the sets of names: {known}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, and at most {_MAX_S:g}")
    return seconds


def _url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as http://localhost:4318")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the exporter until a signal stops it. Return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    # Before any thread, also those of gRPC: all of them leave the signals to this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    push = _otlp(parser, options)
    journal.setup(options.log_level, "resctrlmon-exporter")
    source = Source(options.manager_socket, options.timeout)
    events, names = options.event or metrics.DEFAULT_EVENTS, options.names or metrics.DEFAULT_NAMES
    exporter = Exporter(source, events, names, options.node_name or _node_name())
    try:
        if push is not None:
            return push(source, metrics.selected(events))
        if options.textfile:
            return _write(Textfile(options.textfile, exporter, options.timeout), options.interval or _INTERVAL_S)
        return _serve(options, exporter)
    except (OSError, ValueError) as error:
        log.error("cannot start: %s", error)
        return os.EX_OSERR


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with a message if options cannot be used together. ``_otlp`` checks those of OTLP."""
    if options.certfile is None and (options.keyfile or options.client_cafile):
        parser.error("--keyfile and --client-cafile need --certfile")
    if options.textfile and (options.listen or options.certfile):
        parser.error("--listen and --certfile cannot be used with --textfile, which does not listen")
    if options.interval and not options.textfile and options.otlp is None:
        parser.error("--interval needs --textfile or --otlp")
    if options.node_name and metrics.Names.NRI_RESCTRL_MON not in (options.names or ()):
        parser.error("--node-name needs --names nri-resctrl-mon")
    events = metrics.selected(options.event or metrics.DEFAULT_EVENTS)
    if metrics.Names.NODE_EXPORTER in (options.names or ()) and events.keys().isdisjoint(metrics.OF_NODE_EXPORTER):
        parser.error(f"--names node-exporter needs an --event of: {', '.join(metrics.OF_NODE_EXPORTER)}")


def _otlp(parser: argparse.ArgumentParser, options: argparse.Namespace) -> _Push | None:
    """Return the function that pushes, with --otlp. Errors of the command line end the process."""
    if options.otlp is None:
        if options.otlp_protocol or options.otlp_temporality or options.otlp_state:
            parser.error("--otlp-protocol, --otlp-temporality and --otlp-state need --otlp")
        return None
    if options.listen or options.certfile or options.textfile:
        parser.error("--listen, --certfile and --textfile cannot be used with --otlp: start a further exporter")
    if options.names or options.node_name:
        parser.error("--names and --node-name cannot be used with --otlp, which has names of OpenTelemetry")
    temporality = Temporality(options.otlp_temporality or _TEMPORALITY)
    if temporality is Temporality.DELTA and options.otlp_state is None:
        parser.error("--otlp-temporality delta needs --otlp-state: after a restart, the use would be pushed again")
    protocol = options.otlp_protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOLS[0]
    if protocol not in _PROTOCOLS:
        parser.error(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; the protocols are: {', '.join(_PROTOCOLS)}")
    try:
        # Not above: Debian 13 has no packages of the SDK.
        from resctrlmond.exporter.otlp.pusher import Pusher  # noqa: PLC0415
        from resctrlmond.exporter.otlp.sender import Protocol, Sender  # noqa: PLC0415

        sender = Sender(options.otlp or None, Protocol(protocol), temporality)
    except ImportError as error:
        parser.error(
            f"--otlp needs the SDK of OpenTelemetry with its exporters, which cannot be imported: {error}. Debian 13"
            " does not have them: install opentelemetry-exporter-otlp with pip into an environment of its own, see"
            " resctrlmon-exporter(8), PUSHING"
        )
    except Exception as error:
        parser.error(f"the SDK of OpenTelemetry does not accept the settings OTEL_*: {error}")

    def push(source: Source, events: Mapping[str, metrics.EventMetrics]) -> int:
        try:
            ledger = Ledger(temporality, options.otlp_state)
        except (OSError, ValueError) as error:
            log.error("cannot start: %s", error)
            return os.EX_CANTCREAT
        ends = Ends(options.manager_socket)
        pusher = Pusher(source, ends, sender, ledger, events, timeout_s=options.timeout)
        stop = threading.Event()
        arguments = (options.interval or _PUSH_INTERVAL_S, stop)
        thread = threading.Thread(target=pusher.run, args=arguments, name="push", daemon=True)
        ends.start()
        thread.start()
        log.info("pushing to %s", sender.url)
        notify = Notify()
        notify.ready()
        signal.sigwait(_STOPPING)
        notify.stopping()
        stop.set()
        thread.join(_LAST_PUSH_S)
        return os.EX_OK

    return push


def _serve(options: argparse.Namespace, exporter: Exporter) -> int:
    """Serve all sockets, until a signal arrives. Return the exit status. Raises OSError if it cannot start."""
    tls = None
    if options.certfile:
        tls = server_context(options.certfile, options.keyfile, options.client_cafile)
        exporter.certificates = expiries(options.certfile, options.client_cafile)
    application, room = Application(exporter, options.timeout), Room(MAX_CONNECTIONS, exporter.failures)
    with contextlib.ExitStack() as stack:
        for listener in _listeners(options.listen or listening.parse(listening.DEFAULT)):
            server = stack.enter_context(Server(listener, application, room, tls))
            thread = threading.Thread(target=server.serve_forever, name="serve", daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            log.info("serving metrics on %s", _text(listener))
        notify = Notify()
        notify.ready()
        signal.sigwait(_STOPPING)
        notify.stopping()
    return os.EX_OK


def _listeners(address: listening.Address) -> Iterable[socket.socket]:
    # A socket unit with several ListenStream= lines passes all of them under one name.
    return [listener for _, listener in sockets.passed_listeners()] or [listening.listen(address)]


def _text(listener: socket.socket) -> str:
    name = listener.getsockname()
    return str(listening.Address(host=name[0], port=name[1]) if isinstance(name, tuple) else name)


def _write(textfile: Textfile, interval_s: float) -> int:
    """Write the file at each interval, until a signal arrives. Return the exit status."""
    # node_exporter runs as another user, and must be able to read the file.
    os.umask(0o022)
    if not textfile.write():
        return os.EX_CANTCREAT
    notify = Notify()
    notify.ready()
    while signal.sigtimedwait(_STOPPING, interval_s) is None:
        textfile.write()
    notify.stopping()
    textfile.remove()
    return os.EX_OK
