"""The text of a chat that is not answered: it is counted (/tokenize) or pooled (/v1/embeddings, /pooling, /classify)."""

from typing import Any, Protocol

from compilerllm.errors import InvalidParameter
from compilerllm.server.service import Service
from compilerllm.text.chat import render_chat


class ChatText(Protocol):
    """A body with a chat in it."""

    messages: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


def chat_text(service: Service, asked: ChatText, **options: Any) -> str:
    """The chat as the model's template writes it, special tokens included. ``options``: more for the template.

    Raises ``InvalidParameter`` for a template of the request's own where the server does not take one.
    """
    if asked.chat_template is not None and not service.config.trust_request_chat_template:
        raise InvalidParameter(
            "chat_template: this server uses the model's own; it takes a request's with --trust-request-chat-template",
            "chat_template",
        )
    return render_chat(
        service.tokenizer,
        service.model,
        asked.messages,
        asked.chat_template,
        **{
            "add_generation_prompt": asked.add_generation_prompt,
            "continue_final_message": asked.continue_final_message,
            **options,
            **asked.chat_template_kwargs,
        },
    )
