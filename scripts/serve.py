"""Serve a model over HTTP: OpenAI's and Gemini's APIs, plain, streaming and over WebSockets.

    python scripts/serve.py --model smollm2 --port 8000

Prints one line `ready http://HOST:PORT` on stdout once every program is compiled (with --no-warmup: once the model is
loaded); logs go to stderr. Ends with exit code 0 after a stop signal, 1 when the start or later the engine failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbra.configs.engine import EngineConfig
from umbra.configs.files import cache_dir
from umbra.configs.keys import ApiKey, Limits, new_key, plain_keys, read_keys
from umbra.configs.server import ServerConfig
from umbra.scripts.level_options import add_level_option, add_lossy_option
from umbra.scripts.model_options import (
    OneLineParser,
    State,
    add_draft_option,
    add_model_options,
    add_state_options,
    only,
    open_engine,
    prepare,
    state,
)
from umbra.serving.logs import log_to_stderr

if TYPE_CHECKING:
    from umbra.serving.api.server import Load

SIZES = (
    "slots",
    "context_length",
    "kv",
    "kv_memory",
    "prefill_chunk",
    "decode_steps",
    "hot_window",
    "max_queue",
    "embeddings",
)
"""Options that are fields of `EngineConfig` of the same name."""


def parser() -> argparse.ArgumentParser:
    engine, server = EngineConfig(), ServerConfig()
    p = OneLineParser(prog="serve.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_model_options(p)
    add_draft_option(p)
    add_level_option(p, default=server.level)
    add_lossy_option(p)
    p.add_argument("--no-warmup", action="store_true", help="compile at first use: ready sooner, then slow at first")
    sizes = p.add_argument_group("sizes")
    sizes.add_argument(
        "--slots", type=int, default=engine.slots,
        help="sequences that run at once, per data shard of the mesh",
    )  # fmt: skip
    sizes.add_argument(
        "--context-length", type=int, help="positions of a sequence (default: the model's, at most 8192)"
    )
    sizes.add_argument(
        "--kv-memory", type=float, default=engine.kv_memory,
        help="GiB of KV blocks, per data shard of the mesh",
    )  # fmt: skip
    sizes.add_argument("--prefill-chunk", type=int, default=engine.prefill_chunk, help="prompt tokens a step")
    sizes.add_argument("--decode-steps", type=int, help="steps of a device loop (default: 1 on a CPU, 8 on a TPU)")
    sizes.add_argument(
        "--hot-window", default=engine.hot_window, type=only("auto", "off"),
        help="KV kept on the chip through a device loop: auto (on TPUs) or off",
    )  # fmt: skip
    sizes.add_argument(
        "--embeddings", action=argparse.BooleanOptionalAction, default=True, help="also embed texts (default: yes)"
    )
    sizes.add_argument("--max-queue", type=int, default=engine.max_queue, help="requests that may wait")
    add_state_options(p, default=cache_dir() / "state")
    http = p.add_argument_group("server")
    http.add_argument("--host", default=server.host, help="address to listen on")
    http.add_argument("--port", type=int, default=server.port, help="0: any free port")
    http.add_argument(
        "--api-keys", type=Path, metavar="FILE",
        help="keys clients may send, with their limits (TOML, see configs/keys.py); also $UMBRA_API_KEYS: keys with "
        "commas between them. Without keys only loopback addresses are listened on",
    )  # fmt: skip
    http.add_argument("--api-key", action="append", metavar="KEY", help="one key more (or $UMBRA_API_KEY)")
    http.add_argument("--new-api-key", metavar="NAME", help="print a new key and its table for --api-keys, and end")
    own = ", of each key whose table does not say; 0: any"
    for name, what in (
        ("requests-per-minute", "requests a minute"), ("tokens-per-minute", "tokens a minute, prompts included"),
        ("max-concurrent", "requests in progress"),
    ):  # fmt: skip
        http.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"{what}{own}")
    http.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="pages that may use the server; *: all"
    )
    http.add_argument(
        "--request-timeout", type=float, default=server.request_timeout, metavar="SECONDS",
        help="until an answer must be complete",
    )  # fmt: skip
    http.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM; needs --tls-key")
    http.add_argument("--tls-key", metavar="FILE", help="private key, PEM; needs --tls-cert")
    http.add_argument("--max-body", type=int, default=server.max_body, help="bytes of a request body")
    http.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="least that is logged"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    try:
        if args.new_api_key is not None:
            print("key: {}\n\n{}".format(*new_key(args.new_api_key)), end="")
            return 0
        sizes = {name: getattr(args, name) for name in SIZES}
        EngineConfig(**sizes)
        kept = state(args, default=cache_dir() / "state")
        config = ServerConfig(
            host=args.host, port=args.port, api_keys=given_keys(args), max_body=args.max_body, level=args.level,
            lossy=args.lossy, cors_origins=tuple(args.cors_origin), request_timeout=args.request_timeout,
            limits=Limits(args.requests_per_minute, args.tokens_per_minute, args.max_concurrent),
        )  # fmt: skip
        if (args.tls_cert is None) != (args.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
    except ValueError as error:
        options.error(str(error))
    log_to_stderr(args.log_level)
    prepare(args.threads, args.mesh, args.kernels)
    try:
        return serve(args, config, sizes, kept)
    except Exception as error:
        logging.getLogger(__name__).debug("the server ends", exc_info=True)
        print(f"serve.py: {one_line(error)}", file=sys.stderr)
        return 1


def given_keys(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    """The keys of the file, the command line and the environment; each once."""
    named = read_keys(args.api_keys) if args.api_keys is not None else ()
    listed = [*os.environ.get("UMBRA_API_KEYS", "").split(","), os.environ.get("UMBRA_API_KEY", "")]
    plain = plain_keys(*(args.api_key or ()), *(key.strip() for key in listed if key.strip()))
    digests = {key.sha256 for key in named}
    return (*named, *(key for key in plain if key.sha256 not in digests))


def one_line(error: Exception) -> str:
    """The error's sentence; with its type when it is none of ours and so may not be one."""
    text = " ".join(str(error).split()) or "no message"
    expected = isinstance(error, ValueError | OSError) or type(error).__module__.startswith("umbra.")
    return text if expected else f"{type(error).__name__}: {text}"


def serve(args: argparse.Namespace, config: ServerConfig, sizes: dict[str, Any], kept: State | None) -> int:
    """Listen, load in the background, and serve until a signal says stop."""
    # Only now: these import JAX, whose settings `prepare` makes.
    from umbra.serving.api import Service
    from umbra.serving.api.server import Tls, listen, run, url

    service = Service(config)
    for path in filter(None, (args.tls_cert, args.tls_key)):
        Path(path).read_bytes()  # fails here, with the file's name
    tls = Tls(args.tls_cert, args.tls_key) if args.tls_cert else None
    sock = listen(config.host, config.port)
    address = url(config.host, sock, tls)
    if config.api_keys:
        logging.info("%d API keys; every request needs one", len(config.api_keys))
    else:
        logging.info("no API key is configured: open to everybody on this machine, and to nobody else")
    return run(service, sock, loader(args, sizes, kept), lambda: print(f"ready {address}", flush=True), tls)


def loader(args: argparse.Namespace, sizes: dict[str, Any], kept: State | None) -> Load:
    """What the server runs in the background to get its model."""
    from umbra.serving.api import Service
    from umbra.serving.console import StartupProgress

    def load(service: Service) -> Any:
        with StartupProgress() as progress:

            def report(stage: str, done: int, total: int) -> None:
                progress(stage, done, total)
                service.progress = progress.text

            model, engine = open_engine(
                args.model,
                args.quant,
                args.mesh,
                kernels=args.kernels,
                embedding=args.embedding,
                draft=args.draft,
                shadow=args.shadow,
                progress=report,
                metrics=service.engine_metrics,
                warm=not args.no_warmup,
                state=kept,
                **sizes,
            )
        logging.info(
            "%s as %s, context %d tokens, %d slots, %s, numerics %s, recent KV %s",
            model.name,
            model.quant,
            engine.context_length,
            engine.stats().total_slots,
            engine.system_fingerprint,
            engine.numerics_class,
            engine.l1_mode or "not known before the first step",
        )
        return engine, model

    return load


if __name__ == "__main__":
    sys.exit(main())
