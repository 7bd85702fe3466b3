"""The demo's page: HTML, event handlers, and a filter that protects the server from other sites.

The HTML is in page.html.j2, and its style is in style.css.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from decoding.errors import UserError

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads this on import, and then sends no requests
import gradio as gr
import jinja2
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.measure.markdown import visible
from decoding.text import Piece, Step, Tally
from trainer.demo.race import AUTOMATIC, Form, Models, Race, fitting_rules, number_of, race_of, whole

FRAME_SECONDS = 0.08
"""Seconds of decoding between two updates of the page."""
_MOST_RACES = 64
_LONGEST_REQUEST = 1_000_000  # bytes
_FOLDER = Path(__file__).parent


# --- HTML -------------------------------------------------------------------------------------------------------------


def spans(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """Return pieces of text as (class, text); neighbours of the same origin are joined."""
    grouped = groupby(pieces, key=lambda piece: "drafted" if piece.drafted else "own")
    return [(kind, visible("".join(piece.text for piece in group))) for kind, group in grouped]


def label_of(text: str) -> str:
    """Return a token's text with visible white space, cut to fit a node."""
    signs = {" ": "·", "\n": "↵", "\t": "⇥"}
    label = "".join(signs.get(it) or (it if it.isprintable() else repr(it)[1:-1]) for it in text)
    return label if len(label) <= 16 else f"{label[:15]}…"


def tree_of(step: Step, text_of: Callable[[int], str]) -> dict[str, Any] | None:
    """Return a step's candidate tree as nested nodes. The token that the target wrote follows the kept nodes.

    A node has a ``label``, a ``kind`` (root, kept, dropped or written) and ``children`` in the order of drafting.
    Returns None if nothing was drafted.
    """
    if step.tree is None:
        return None
    nodes: list[dict[str, Any]] = []
    for index, (token, parent) in enumerate(zip(step.tree.token_list, step.tree.shape.parents, strict=True)):
        kind = "root" if parent < 0 else "kept" if index in step.path else "dropped"
        nodes.append({"label": label_of(text_of(token)), "kind": kind, "children": []})
        if parent >= 0:
            nodes[parent]["children"].append(nodes[index])
    if len(step.tokens) > step.accepted:
        written = {"label": label_of(text_of(step.tokens[step.accepted])), "kind": "written", "children": []}
        nodes[step.path[-1] if step.path else 0]["children"].append(written)
    return nodes[0]


def parts_of(tally: Tally) -> list[tuple[str, str, float]]:
    """Return (class, name, milliseconds per token) for draft, target pass and overhead."""
    drafts = tally.draft_seconds if tally.drafted else 0.0  # deciding not to draft also counts as overhead
    overhead = tally.overhead_seconds + tally.draft_seconds - drafts
    parts = (("draft", "draft", drafts), ("verify", "target pass", tally.verify_seconds))
    seconds = (*parts, ("overhead", "overhead", overhead))
    return [(kind, name, 1000 * spent / tally.tokens if tally.tokens else 0.0) for kind, name, spent in seconds]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True
)
_TEMPLATES.filters |= {"spans": spans, "parts": parts_of}
HTML: Any = _TEMPLATES.get_template("page.html.j2").module
"""The template's macros, one for each part of the page."""


def step_html(race: Race | None, index: int) -> str:
    """Return the HTML of the speculative side at step ``index`` (0: the prefill): its tree, and the text so far."""
    if race is None or not race.speculative.steps:
        return str(HTML.no_step())
    index = min(max(index, 0), len(race.speculative.steps) - 1)
    step, tokenizer = race.speculative.steps[index], race.models.tokenizer
    return str(HTML.step(race.speculative, step, index, tree_of(step, lambda token: str(tokenizer.decode([token])))))


# --- the page ---------------------------------------------------------------------------------------------------------

# Gradio's checks of inputs print tracebacks on the server's terminal; `race_of` checks the inputs instead.
_PRIVATE: Any = {"api_visibility": "private", "preprocess": False}
_AT_ONCE: Any = {**_PRIVATE, "show_progress": "hidden", "queue": False}


class Words(NamedTuple):
    """Texts of the page: the target's name, prompts to try, and notes under the title."""

    target: str
    examples: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Shown(NamedTuple):
    """Components that show a race. The slider ``step`` selects the step that ``drawing`` shows."""

    notice: Any
    summary: Any
    texts: Any
    step: Any
    drawing: Any
    charts: Any


def build(models: Models, words: Words) -> gr.Blocks:
    """Return the page. Each browser tab has its own race; races run one after another."""
    size = sum(parameter.numel() for parameter in models.target.model.parameters()) / 1e6
    page = gr.Blocks(title="Headstart demo", analytics_enabled=False)
    with page:
        gr.HTML(HTML.title(words, models.target, size))
        form = _form(models, words)
        with gr.Row(elem_classes="buttons"):
            run = gr.Button("Run", variant="primary", elem_id="run")
            stop = gr.Button("Stop", elem_id="stop")
        notice, summary = gr.HTML("", elem_id="notice"), gr.HTML("", elem_id="summary")
        texts = gr.HTML(HTML.texts(None), elem_id="texts")
        gr.HTML(HTML.legend())
        label = "Target pass (0 is the prefill; use the arrow keys)"
        step = gr.Slider(0, 1, 0, step=1, label=label, elem_id="pass", buttons=[])
        drawing = gr.HTML(step_html(None, 0), elem_id="tree")
        shown = Shown(notice, summary, texts, step, drawing, gr.HTML("", elem_id="charts"))
        Answers(models, shown).connect(page, form, run, stop)
    return page


def _form(models: Models, words: Words) -> Form:
    name, drafter = next(iter(models.drafters.items()))
    label = "Prompt (Shift+Enter runs it)"
    prompt = gr.Textbox(words.examples[0], label=label, lines=4, max_lines=12, elem_id="prompt")
    samples = [[example] for example in words.examples]
    examples = gr.Dataset(components=[prompt], samples=samples, label="Examples", type="index")

    def example(index: float) -> str:
        return words.examples[whole("example", index, 0, len(words.examples) - 1)]

    examples.click(reporting(example), examples, prompt, **_AT_ONCE)
    with gr.Row(elem_classes="controls"):
        return Form(
            prompt,
            gr.Dropdown(list(models.drafters), value=name, label="Drafter", elem_id="drafter"),
            gr.Dropdown(fitting_rules(drafter, 0.0), value=AUTOMATIC, label="Acceptance rule", elem_id="rule"),
            gr.Slider(1, *_range(drafter.max_depth, 1), step=1, label="Depth", elem_id="depth"),
            gr.Slider(2, *_range(drafter.max_nodes, 2), step=1, label="Tree nodes", elem_id="nodes"),
            gr.Number(0.0, label="Temperature", step=0.1, elem_id="temperature"),
            gr.Number(96, label="Max new tokens", elem_id="most"),
            gr.Number(0, label="Seed", elem_id="seed"),
        )


def _range(most: int, least: int) -> tuple[int, int]:
    """Return a slider's maximum and value; the maximum must be larger than the minimum."""
    return max(most, least + 1), most


class Answers:
    """Event handlers of the page. The last race of each visitor is kept, so that its steps can be shown."""

    def __init__(self, models: Models, shown: Shown) -> None:
        self.models, self.shown = models, shown
        self.races: dict[str, Race] = {}

    def connect(self, page: gr.Blocks, form: Form, run: Any, stop: Any) -> None:
        """Connect the handlers to the components; call this inside the page."""
        shown = self.shown
        # Gradio's queue runs one race at a time and shows visitors their place in the queue.
        queued: Any = {**_PRIVATE, "concurrency_limit": 1, "show_progress_on": shown.notice}
        gr.on([run.click, form.prompt.submit], self.run, form, shown, **queued)
        stop.click(self.stop, **_AT_ONCE)
        shown.step.input(reporting(self.look), [shown.step], [shown.drawing], trigger_mode="always_last", **_AT_ONCE)
        changes, chosen = [form.drafter.change, form.temperature.change], [form.drafter, form.temperature, form.rule]
        gr.on(changes, reporting(self.rules), chosen, [form.rule], **_AT_ONCE)
        form.drafter.change(reporting(self.bounds), [form.drafter], [form.depth, form.nodes], **_AT_ONCE)
        page.unload(self.leave)

    def run(self, request: gr.Request, *entries: Any) -> Iterator[dict[Any, Any]]:
        """Run a race to its end; yield the changes of the page."""
        visitor, shown = str(request.session_hash), self.shown
        try:
            race = race_of(self.models, Form(*entries))
        except UserError as error:
            yield {shown.notice: HTML.notice(_sentence(error))}
            return
        self.races.pop(visitor, None)  # moves the visitor to the end
        self.races[visitor] = race
        while len(self.races) > _MOST_RACES:
            self.races.pop(next(iter(self.races)))
        try:
            running = True
            while running:
                running = race.advance(FRAME_SECONDS)
                last = max(0, len(race.speculative.steps) - 1)
                index = last if race.shown_step is None else race.shown_step
                yield {
                    shown.notice: "",
                    shown.summary: HTML.summary(race),
                    shown.texts: HTML.texts(race),
                    shown.step: gr.update(maximum=max(1, last), value=index),
                    shown.drawing: step_html(race, index),
                    shown.charts: HTML.charts(race),
                }
        finally:
            race.close()

    def look(self, request: gr.Request, number: Any) -> str:
        """Show a step and stay on it while the texts grow; if it is the last step, follow the text again."""
        race, index = self.races.get(str(request.session_hash)), int(number_of("the pass", number))
        if race is not None:
            race.shown_step = index if index < len(race.speculative.steps) - 1 else None
        return step_html(race, index)

    def stop(self, request: gr.Request) -> None:
        """Stop the visitor's race; keep its texts and steps."""
        if race := self.races.get(str(request.session_hash)):
            race.stopped = race.stopped or not race.finished

    def leave(self, request: gr.Request) -> None:
        """Forget a visitor who closed the page; stop the race and free its caches."""
        if race := self.races.pop(str(request.session_hash), None):
            race.close()

    def rules(self, drafter: str, temperature: Any, chosen: str) -> Any:
        """Offer the rules that suit the drafter and the temperature; keep the chosen rule if it is one of these."""
        rules = fitting_rules(self.models.drafter(drafter), temperature)
        return gr.update(choices=rules, value=chosen if chosen in dict(rules).values() else AUTOMATIC)

    def bounds(self, name: str) -> tuple[Any, Any]:
        """Limit the sliders of depth and tree size to what the drafter supports, and set both to the maximum."""
        drafter = self.models.drafter(name)
        (deepest, depth), (largest, nodes) = _range(drafter.max_depth, 1), _range(drafter.max_nodes, 2)
        return gr.update(maximum=deepest, value=depth), gr.update(maximum=largest, value=nodes)


def reporting(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Report invalid input in a sentence on the page instead of a traceback on the server's terminal."""

    @wraps(answer)
    def answered(*given: Any) -> Any:
        try:
            return answer(*given)
        except UserError as error:
            raise gr.Error(_sentence(error), print_exception=False) from None

    return answered


def _sentence(error: UserError) -> str:
    text = str(error).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


# --- the server -------------------------------------------------------------------------------------------------------


_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "DejaVu Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
_ENTRIES = ("/gradio_api/queue/join", "/gradio_api/run/predict")
"""Paths to which the page sends its inputs. All others, including uploads, are closed."""
_READING = ("GET", "HEAD", "OPTIONS")
_HEADERS = {
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class AccessFilter:
    """ASGI middleware in front of a Gradio page.

    A request must name ``host`` or this machine as its host, because another site's name could also resolve to this
    address (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, page: Any, host: str) -> None:
        self.app, self.page = app, page
        self.everywhere = host in ("0.0.0.0", "::")
        self.names = {"localhost", "127.0.0.1", "::1", host.lower()}
        if self.everywhere:
            self.names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request with a sentence, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        body, refused = b"", self._refusal(scope)
        if refused is None and scope["method"] not in _READING:
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > _LONGEST_REQUEST:
                    break
            refused = self._refused_entry(body)
        if refused is not None:
            await PlainTextResponse(f"{refused}\n", 403)(scope, receive, send_with_headers)
            return
        messages: list[Message] = [{"type": "http.request", "body": body}] if body else []

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(host):
            return f"this page is not served as {host:.100}: open the address that 'headstart demo' printed"
        if origin is not None and origin.partition("//")[2] != host:
            return f"the page at {origin:.100} may not send requests to this page"
        if scope["method"] not in _READING and scope["path"] not in _ENTRIES:
            return f"this page does not accept requests at {scope['path']:.100}"
        return None

    def _refused_entry(self, body: bytes) -> str | None:
        """Return why the body of a request is invalid; a valid body has one plain value for each input of the event."""
        if len(body) > _LONGEST_REQUEST:
            return f"the request is longer than {_LONGEST_REQUEST} bytes: shorten the prompt"
        try:
            call = json.loads(body)
            inputs, values = self.page.fns[call["fn_index"]].inputs, call["data"]
            plain = all(value is None or isinstance(value, str | int | float) for value in values)
            return None if plain and len(values) == len(inputs) else "no event of this page accepts these values"
        except (ValueError, KeyError, TypeError, RecursionError):
            return "this page has no such event"

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or (self.everywhere and bool(ip_address(name)))  # never the name of another site
        except ValueError:
            return False


def launch(page: gr.Blocks, host: str, port: int) -> str:
    """Start serving the page in a thread; return its address."""
    theme = gr.themes.Base(font=_SANS, font_mono=_MONO, primary_hue="green", neutral_hue="gray", radius_size="sm")
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        theme=theme,
        app_kwargs={"middleware": [Middleware(AccessFilter, page=page, host=host)]},
        # Not passed as ``css``: Gradio would rewrite the selectors, and selectors in media queries would match nothing.
        head=f"<style>{(_FOLDER / 'style.css').read_text(encoding='utf-8')}</style>",
    )
    return str(address)


def serve(page: gr.Blocks, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; call ``ready`` with its address once it answers."""
    ready(launch(page, host, port))
    try:
        threading.Event().wait()
    finally:  # `guarded` handles Ctrl-C
        page.close(verbose=False)
