"""The page of the demo: Gradio's components, and which of the other modules answers each."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported: no request leaves this machine
import gradio as gr
from gradio.events import api
from starlette.middleware import Middleware

from trainer.demo import views
from trainer.demo.access import AccessFilter
from trainer.demo.form import AUTOMATIC, Form, drafter_of, fitting_rules, number_of, whole
from trainer.demo.race import Models, Race
from trainer.demo.visitors import Visitors

CSS = Path(__file__).with_name("style.css")
_RACES_AT_ONCE = 16
# Gradio's own checks of entries write a traceback on the server's terminal: those of `Form` answer in their place.
QUIET: Any = {"show_progress": "hidden", "api_visibility": "private", "preprocess": False}
AT_ONCE: Any = {**QUIET, "queue": False}
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "DejaVu Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


@dataclass(frozen=True)
class Words:
    """Words of the page: the target's name, beginnings or questions to try, and notes under the title."""

    target: str
    examples: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Controls(NamedTuple):
    """Components that are filled in, by the names of the fields of `Form`."""

    prompt: Any
    drafter: Any
    rule: Any
    depth: Any
    nodes: Any
    temperature: Any
    max_new_tokens: Any
    seed: Any


class Views(NamedTuple):
    """Components that show a race; ``place`` is the slider of the step that ``drawing`` shows."""

    notice: Any
    summary: Any
    texts: Any
    place: Any
    drawing: Any
    charts: Any


def build(models: Models, words: Words) -> gr.Blocks:
    """Return the page. Each browser tab that opens it is a visitor with a race of its own."""
    page = gr.Blocks(title="Headstart demo", analytics_enabled=False)
    with page:
        gr.HTML(_title(models, words))
        controls = _controls(models, words)
        with gr.Row(elem_classes="buttons"):
            run = gr.Button("Run", variant="primary", elem_id="run")
            stop = gr.Button("Stop", elem_id="stop")
        answers = Answers(models, controls, _views())
        answers.connect(page, run, stop)
    return page


def _controls(models: Models, words: Words) -> Controls:
    first, drafter = next(iter(models.drafters.items()))
    prompt = gr.Textbox(
        words.examples[0], label="Prompt (Shift+Enter runs it)", lines=4, max_lines=12, elem_id="prompt"
    )
    samples = [[each] for each in words.examples]
    examples = gr.Dataset(components=[prompt], samples=samples, label="Examples", type="index")

    def example(index: float) -> str:
        return words.examples[whole("example", index, 0, len(words.examples) - 1)]

    examples.click(reporting(example), examples, prompt, **AT_ONCE)
    with gr.Row(elem_classes="controls"):
        return Controls(
            prompt,
            gr.Dropdown(list(models.drafters), value=first, label="Drafter", elem_id="drafter"),
            gr.Dropdown(fitting_rules(drafter, 0.0), value=AUTOMATIC, label="Acceptance rule", elem_id="rule"),
            gr.Slider(1, *_range(drafter.max_depth, 1), step=1, label="Depth", elem_id="depth"),
            gr.Slider(2, *_range(drafter.max_nodes, 2), step=1, label="Tree nodes", elem_id="nodes"),
            gr.Number(0.0, label="Temperature", step=0.1, elem_id="temperature"),
            gr.Number(96, label="Max new tokens", elem_id="most"),
            gr.Number(0, label="Seed", elem_id="seed"),
        )


def _views() -> Views:
    notice = gr.HTML("", elem_id="notice")
    summary = gr.HTML(views.summary(None), elem_id="summary")
    texts = gr.HTML(views.texts(None), elem_id="texts")
    gr.HTML(views.legend())
    gr.HTML("<h2>Candidate trees, pass by pass</h2>")
    label = "Target pass (0: the prefill; arrow keys step)"
    place = gr.Slider(0, 1, 0, step=1, label=label, elem_id="pass", buttons=[])
    drawing = gr.HTML(views.step_view(None, 0), elem_id="tree")
    gr.HTML("<h2>Acceptance and time</h2>")
    return Views(notice, summary, texts, place, drawing, gr.HTML(views.charts(None), elem_id="charts"))


class Answers:
    """Answers of the page to what its visitors do."""

    def __init__(self, models: Models, controls: Controls, shown: Views) -> None:
        self.models, self.controls, self.shown = models, controls, shown
        self.visitors = Visitors(models)

    def connect(self, page: gr.Blocks, run: Any, stop: Any) -> None:
        """Tie the answers to the components; called within the page."""
        controls, shown = self.controls, self.shown
        queue: Any = {**QUIET, "concurrency_limit": _RACES_AT_ONCE}
        if self.models.target.is_static:  # one cache: races wait for each other, and the page says so
            queue |= {"concurrency_limit": 1, "show_progress": "full", "show_progress_on": shown.notice}
        gr.on([run.click, controls.prompt.submit], self.run, controls, shown, **queue)
        stop.click(self.stop, **AT_ONCE)
        shown.place.input(reporting(self.look), [shown.place], [shown.drawing], trigger_mode="always_last", **AT_ONCE)
        changes = [controls.drafter.change, controls.temperature.change]
        chosen = [controls.drafter, controls.temperature, controls.rule]
        gr.on(changes, reporting(self.rules), chosen, [controls.rule], **AT_ONCE)
        controls.drafter.change(reporting(self.bounds), [controls.drafter], [controls.depth, controls.nodes], **AT_ONCE)
        page.unload(self.leave)
        api(self.count, api_name="visitors")

    def run(self, request: gr.Request, *entries: Any) -> Iterator[dict[Any, Any]]:
        """Run a race to its end; yield what changes on the page."""
        shown = self.shown
        form = Form(**dict(zip(Controls._fields, entries, strict=True)))
        try:
            frames = self.visitors.run(str(request.session_hash), form)
        except ValueError as error:
            yield {shown.notice: views.notice(_sentence(error), "bad")}
            return
        for race in frames:
            last = max(0, len(race.speculative.steps) - 1)
            number = last if race.looked_at is None else race.looked_at
            yield {
                shown.notice: views.notice(self.others(race)),
                shown.summary: views.summary(race),
                shown.texts: views.texts(race),
                shown.place: gr.update(maximum=max(1, last), value=number),
                shown.drawing: views.step_view(race, number),
                shown.charts: views.charts(race),
            }

    def others(self, race: Race) -> str:
        """Return the sentence beside a race under way where others decode too, so that its texts grow more slowly."""
        others = self.visitors.decoding - 1
        if race.ending is not None or others < 1:
            return ""
        who = "1 other page decodes" if others == 1 else f"{others} other pages decode"
        return f"{who} now too, so texts grow more slowly; the figures are those of each pass alone."

    def look(self, request: gr.Request, number: float) -> str:
        """Show a step, and stay there while the texts grow; at the last step, follow them again."""
        race, number = self.visitors.race(str(request.session_hash)), number_of("the pass", number)
        if race is not None:
            race.looked_at = int(number) if number < len(race.speculative.steps) - 1 else None
        return views.step_view(race, int(number))

    def stop(self, request: gr.Request) -> None:
        self.visitors.stop(str(request.session_hash))

    def leave(self, request: gr.Request) -> None:
        self.visitors.leave(str(request.session_hash))

    def count(self) -> dict[str, int]:  # Gradio reads the annotation
        return {"decoding": self.visitors.decoding, "present": self.visitors.present}

    def rules(self, drafter: str, temperature: float | None, asked: str) -> Any:
        """Offer the rules that fit; keep the one that was chosen if it does."""
        rules = fitting_rules(drafter_of(self.models, drafter), temperature)
        return gr.update(choices=rules, value=asked if asked in dict(rules).values() else AUTOMATIC)

    def bounds(self, drafter: str) -> tuple[Any, Any]:
        """Set the bounds of depth and tree to those of the drafter."""
        own = drafter_of(self.models, drafter)
        (deepest, depth), (largest, nodes) = _range(own.max_depth, 1), _range(own.max_nodes, 2)
        return gr.update(maximum=deepest, value=depth), gr.update(maximum=largest, value=nodes)


def reporting(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Report a bad entry in a sentence on the page, not by a traceback on the server's terminal."""

    @wraps(answer)
    def answered(*given: Any) -> Any:
        try:
            return answer(*given)
        except ValueError as error:
            raise gr.Error(_sentence(error), print_exception=False) from None

    return answered


def launch(page: gr.Blocks, host: str, port: int, share: bool) -> str:
    """Serve the page from a thread; return its address, the public one if it is shared."""
    shared = set[str]()
    theme = gr.themes.Base(font=_SANS, font_mono=_MONO, primary_hue="green", neutral_hue="gray", radius_size="sm")
    _, local, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        theme=theme,
        app_kwargs={"middleware": [Middleware(AccessFilter, page=page, host=host, shared=shared)]},
        # Not as ``css``, whose selectors Gradio rewrites: those in media queries then match nothing.
        head=f"<style>{CSS.read_text(encoding='utf-8')}</style>",
    )
    if public:
        shared.add(str(urlsplit(public).hostname))
    return public or local


def serve(page: gr.Blocks, host: str, port: int, share: bool, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; ``ready`` is called with its address once it answers."""
    ready(launch(page, host, port, share))
    try:
        threading.Event().wait()
    finally:  # Ctrl-C goes on to the command's end, which has its sentence and its exit code
        page.close(verbose=False)


def _range(most: int, least: int) -> tuple[int, int]:
    """Return a slider's maximum, which must be above its minimum, and its value."""
    return max(most, least + 1), most


def _title(models: Models, words: Words) -> str:
    dtype = str(models.target.dtype).removeprefix("torch.")
    size = sum(parameter.numel() for parameter in models.target.model.parameters()) / 1e6
    told = (
        f"Target <code>{escape(words.target)}</code>, {size:,.3g}M parameters in {dtype} on {models.target.device.type}"
    )
    notes = "".join(f'<p class="about">{escape(note)}</p>' for note in words.notes)
    return f'<h1>Headstart: plain and speculative decoding</h1><p class="about">{told}.</p>{notes}'


def _sentence(error: ValueError) -> str:
    told = str(error).rstrip(".")
    return f"{told[:1].upper()}{told[1:]}."
