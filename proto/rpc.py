"""gRPC bindings: binds the service of `shard.proto` to an object, or to a stub. Knows names and message types, nothing of their
meaning.

Replaces grpc's generated `_pb2_grpc` module: everything that is needed is in the service's descriptor.
"""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory

from . import shard_pb2
from .certificates import NAME, Certificates
from .link import LARGEST

SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]

# Prompts of a full prefill step are the largest messages; grpc's default of 4 MiB would refuse some.
OPTIONS = [("grpc.max_receive_message_length", LARGEST), ("grpc.max_send_message_length", LARGEST)]
# Between machines: keepalive, so that a silent peer is given up when it doesn't answer.
FAR_OPTIONS = [
    *OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # of a server: how often it may be pinged
    ("grpc.so_reuseport", 0),  # of a server: nobody else listens on its port
]
FAR_CHANNEL_OPTIONS = [*FAR_OPTIONS, ("grpc.ssl_target_name_override", NAME)]


def handler(servicer: object) -> "grpc.GenericRpcHandler[Any, Any]":
    """A grpc handler that calls `servicer.<Method>(request, context)` for every method of the service."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        make: Callable[..., Any] = (
            grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
        )
        request = message_factory.GetMessageClass(method.input_type)
        methods[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Clients have to present a certificate of the same authority."""
    certificate, key, authority = certificates.read()
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """The server has to present one, with the name that all of them share."""
    certificate, key, authority = certificates.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


class Stub:
    """One callable per method of the service, on a channel of grpc or grpc.aio."""

    def __init__(self, channel: Any) -> None:
        for method in SERVICE.methods:
            make = channel.stream_stream if method.client_streaming else channel.unary_unary
            reply = message_factory.GetMessageClass(method.output_type)
            call = make(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=reply.FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        """For type checkers: the methods are set in the constructor."""
        raise AttributeError(f"the Shard service has no method {name!r}")
