"""The page of the demo: Gradio's components, and which of the other modules answers each."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported: no request leaves this machine
import gradio as gr
from gradio.events import api

from trainer.demo import views
from trainer.demo.form import AUTOMATIC, Form, fitting_rules
from trainer.demo.race import Models, Race
from trainer.demo.visitors import Visitors

CSS = Path(__file__).with_name("style.css")
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "DejaVu Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


@dataclass(frozen=True)
class Words:
    """Words of the page: the target's name, beginnings or questions to try, and notes under the title."""

    target: str
    examples: tuple[str, ...]
    notes: tuple[str, ...] = ()
    drafter: str | None = None
    """Drafter that is chosen at first; None: the first one."""


def build(models: Models, words: Words) -> gr.Blocks:
    """Return the page. Each browser tab that opens it is a visitor with a race of its own."""
    visitors = Visitors(models)
    first = words.drafter or next(iter(models.drafters))
    drafter = models.drafters[first]
    page = gr.Blocks(title="Headstart demo", analytics_enabled=False)
    with page:
        gr.HTML(_title(models, words))
        prompt = gr.Textbox(words.examples[0], label="Prompt", lines=4, max_lines=12, elem_id="prompt")
        gr.Examples([[example] for example in words.examples], prompt, label="Examples")
        with gr.Row(elem_classes="controls"):
            chosen = gr.Dropdown(list(models.drafters), value=first, label="Drafter", elem_id="drafter")
            rule = gr.Dropdown(fitting_rules(drafter, 0.0), value=AUTOMATIC, label="Acceptance rule", elem_id="rule")
            depth = gr.Slider(1, *_range(drafter.max_depth, 1), step=1, label="Depth", elem_id="depth")
            nodes = gr.Slider(2, *_range(drafter.max_nodes, 2), step=1, label="Tree nodes", elem_id="nodes")
            temperature = gr.Number(0.0, label="Temperature", step=0.1, elem_id="temperature")
            most = gr.Number(96, label="Max new tokens", precision=0, elem_id="most")
            seed = gr.Number(0, label="Seed", precision=0, elem_id="seed")
        with gr.Row(elem_classes="buttons"):
            run = gr.Button("Run", variant="primary", elem_id="run")
            stop = gr.Button("Stop", elem_id="stop")
        notice = gr.HTML("", elem_id="notice")
        summary = gr.HTML(views.summary(None), elem_id="summary")
        texts = gr.HTML(views.texts(None), elem_id="texts")
        gr.HTML(views.legend())
        gr.HTML("<h2>Candidate trees, pass by pass</h2>")
        place = gr.Slider(
            0, 1, 0, step=1, label="Target pass (0: the prefill; arrow keys step)", elem_id="pass", buttons=[]
        )
        drawing = gr.HTML(views.step_view(None, 0), elem_id="tree")
        gr.HTML("<h2>Acceptance and time</h2>")
        charts = gr.HTML(views.charts(None), elem_id="charts")

        def start(request: gr.Request, *entries: Any) -> Iterator[dict[Any, Any]]:
            names = ("prompt", "drafter", "depth", "nodes", "temperature", "rule", "max_new_tokens", "seed")
            try:
                frames = visitors.run(str(request.session_hash), Form(**dict(zip(names, entries, strict=True))))
            except ValueError as error:
                yield {notice: views.notice(_sentence(error), "bad")}
                return
            for race in frames:
                yield {
                    notice: views.notice(_state(race, visitors)),
                    summary: views.summary(race),
                    texts: views.texts(race),
                    charts: views.charts(race),
                    **shown(race),
                }

        def shown(race: Race) -> dict[Any, Any]:
            """Return the updates of the pass that is shown: the latest, or the one that the visitor looks at."""
            last = max(0, len(race.speculative.steps) - 1)
            if race.looked_at is not None:
                return {place: gr.update(maximum=max(1, last))}
            return {place: gr.update(maximum=max(1, last), value=last), drawing: views.step_view(race, last)}

        def look(request: gr.Request, number: float) -> str:
            race = visitors.race(str(request.session_hash))
            if race is not None:
                race.looked_at = int(number)
            return views.step_view(race, int(number))

        def halt(request: gr.Request) -> None:
            visitors.stop(str(request.session_hash))

        def leave(request: gr.Request) -> None:
            visitors.leave(str(request.session_hash))

        def count() -> dict[str, int]:  # Gradio reads the annotation
            return {"decoding": visitors.decoding, "present": visitors.present}

        def fit(name: str, heat: float | None, asked: str) -> Any:
            rules = fitting_rules(models.drafters[name], heat)
            return gr.update(choices=rules, value=asked if asked in dict(rules).values() else AUTOMATIC)

        def bounds(name: str) -> tuple[Any, Any]:
            own = models.drafters[name]
            (deepest, depth), (largest, nodes) = _range(own.max_depth, 1), _range(own.max_nodes, 2)
            return gr.update(maximum=deepest, value=depth), gr.update(maximum=largest, value=nodes)

        entries = [prompt, chosen, depth, nodes, temperature, rule, most, seed]
        quiet: Any = {"show_progress": "hidden", "api_visibility": "private"}
        # Steps of fixed shapes have one cache: their races wait for each other.
        limit = 1 if models.target.is_static else 16
        outputs = [notice, summary, texts, charts, place, drawing]
        gr.on([run.click, prompt.submit], start, entries, outputs, concurrency_limit=limit, **quiet)
        stop.click(halt, queue=False, **quiet)
        place.input(look, [place], [drawing], trigger_mode="always_last", queue=False, **quiet)
        gr.on([chosen.change, temperature.change], fit, [chosen, temperature, rule], [rule], queue=False, **quiet)
        chosen.change(bounds, [chosen], [depth, nodes], queue=False, **quiet)
        page.unload(leave)
        api(count, api_name="visitors")
    return page


def serve(page: gr.Blocks, host: str, port: int, share: bool, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; ``ready`` is called with its address once it answers."""
    theme = gr.themes.Base(font=_SANS, font_mono=_MONO, primary_hue="green", neutral_hue="gray", radius_size="sm")
    _, local, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        theme=theme,
        # Not as ``css``, whose selectors Gradio rewrites: those in media queries then match nothing.
        head=f"<style>{CSS.read_text(encoding='utf-8')}</style>",
    )
    ready(public or local)
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


def _state(race: Race, visitors: Visitors) -> str:
    """Return the sentence beside a race that runs: others decode too, so that the texts grow more slowly."""
    others = visitors.decoding - 1
    if race.ending is not None or others < 1:
        return ""
    who = "1 other page decodes" if others == 1 else f"{others} other pages decode"
    return f"{who} now too, so texts grow more slowly; the figures are those of each pass alone."
