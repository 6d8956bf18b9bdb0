"""The short way to the endpoints that generate: past the framework's search for a route and its injection of arguments,
which take longer than reading and checking a request does."""

import inspect

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send


class Shortcut:
    """The innermost middleware: a POST to a path without parameters whose endpoint takes the request and nothing else.

    Such an endpoint makes a response of whatever it raises (``Service.respond``). FastAPI has its route all the same, for
    the documents and for other methods' refusals.
    """

    def __init__(self, app: ASGIApp, routes: FastAPI) -> None:
        self._app = app
        self._endpoints = {
            route.path: route.endpoint
            for route in routes.routes
            if isinstance(route, APIRoute)
            and route.methods == {"POST"}
            and not route.param_convertors
            and [p.annotation for p in inspect.signature(route.endpoint).parameters.values()] == [Request]
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(get_route_path(scope)) if posted else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
