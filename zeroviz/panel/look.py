"""What the page needs beside widgets: a style sheet, and what plain widgets leave out for keys and screen readers."""

from __future__ import annotations

from zeroviz.draw_formula import CSS as FORMULA

_PAGE = """
.zeroviz-explorer { --zv-paper: #ffffff; --zv-ink: #1a1a1a; --zv-muted: #555555; --zv-rule: #d0d0d0;
  --zv-track: #ececec; --zv-fits-1: #eaf5fc; --zv-fits-2: #c5e4f6; --zv-fits-3: #97ceee;
  --zv-exceeds-1: #fbe0cc; --zv-exceeds-2: #f6c49f; --zv-exceeds-3: #f0a873; }
[data-jp-theme-light="false"] .zeroviz-explorer { --zv-paper: #1b1b1b; --zv-ink: #f2f2f2; --zv-muted: #b9b9b9;
  --zv-rule: #4a4a4a; --zv-track: #383838; --zv-fits-1: #143141; --zv-fits-2: #0e4666; --zv-fits-3: #075c8c;
  --zv-exceeds-1: #4a2c14; --zv-exceeds-2: #783c0e; --zv-exceeds-3: #a64d07; }
/* A light line would be lost on bright paint. */
[data-jp-theme-light="false"] .zeroviz-drawing .zl { filter: drop-shadow(0 0 1.2px #000) drop-shadow(0 0 0.6px #000); }
.zeroviz-drawing { color: var(--zv-ink, #1a1a1a); }
/* Between one column of pictures and two there is nothing to be gained by more room. */
.zeroviz-explorer { max-width: 1720px; container-type: inline-size; }
@media (min-width: 2400px) { .zeroviz-explorer { max-width: 3840px; } }
.zeroviz-explorer .widget-html-content { white-space: normal; overflow-wrap: break-word; min-width: 0; }
.zeroviz-main { display: grid; grid-template-columns: minmax(0, 1fr); gap: 4px 20px; overflow: hidden; }
.zeroviz-desk { display: flex; flex-flow: column; min-width: 0; overflow: hidden; }
.zeroviz-controls { display: flex; flex-flow: row wrap; gap: 0 22px; padding: 2px; overflow: hidden; }
.zeroviz-controls > * { min-height: 32px; height: auto; margin: 0; align-items: center; flex: 1 1 230px; }
.zeroviz-controls > .widget-toggle-buttons { flex: 0 1 auto; }
.zeroviz-controls .widget-label { font-size: 14px; text-align: left; flex: 0 0 85px; width: 85px; }
.zeroviz-controls select { font-size: 14px; height: 28px; }
.zeroviz-controls .widget-toggle-buttons { display: flex; flex-flow: row nowrap; }
@container (min-width: 1080px) {
  .zeroviz-main { grid-template-columns: 392px minmax(0, 1fr); align-items: start; }
  .zeroviz-controls { flex-flow: column; }
  .zeroviz-controls > *, .zeroviz-controls > .widget-toggle-buttons { flex: 0 0 auto; }
  /* The controls stay in sight while the pictures beside them scroll, which takes a page without a frame that scrolls
     between them and the notebook: Lab's own is clipped instead, see below. */
  .zeroviz-main { overflow: clip; }
  .zeroviz-desk { position: sticky; top: 0; align-self: start; max-height: calc(100vh - 135px);
    overflow: hidden auto; }
  body[data-voila] .zeroviz-desk { max-height: calc(100vh - 16px); }
  .zeroviz-desk > * { flex: 0 0 auto; }
  /* Over its own margin too, or a strip of what is cut off would show below it. */
  .zeroviz-desk > .zeroviz-bar { position: sticky; bottom: 0; z-index: 9; margin: 0; padding: 4px 2px;
    background: var(--jp-layout-color0, #fff); border-top: 1px solid var(--jp-border-color2, #ccc); }
}
/* On a very wide page the pictures stand in two columns. */
@container (min-width: 2300px) {
  .zeroviz-main { grid-template-columns: 520px minmax(0, 1fr); }
  .zeroviz-main .zeroviz-desk :is(.widget-label, .widget-label-basic, .widget-readout, select, button, input) {
    font-size: 17px; }
  .zeroviz-desk .zeroviz-bar button { width: 190px; }
  .zeroviz-main .zeroviz-desk .widget-label { flex-basis: 108px; width: 108px; }
  .zeroviz-stage:not(.zeroviz-presenting) { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr));
    align-items: start; gap: 12px; }
  .zeroviz-stage:not(.zeroviz-presenting) :is(.zeroviz-heading, .zeroviz-step, .zeroviz-now-held) { font-size: 18px; }
  .zeroviz-stage:not(.zeroviz-presenting) .zeroviz-now { font-size: 20px; }
  .zeroviz-stage:not(.zeroviz-presenting) > .zeroviz-formula-section { grid-column: 1 / -1; }
}
.zeroviz-explorer, .jp-OutputArea-output:has(> .zeroviz-explorer), .jp-OutputArea-child:has(.zeroviz-explorer),
.jp-Cell-outputArea:has(.zeroviz-explorer) { overflow: clip; }
.zeroviz-controls .widget-checkbox .widget-label-basic { font-size: 14px; }
.zeroviz-controls .widget-toggle-buttons button, .zeroviz-controls .jupyter-button { font-size: 14px; }
.zeroviz-controls .widget-toggle-buttons .jupyter-button { width: auto; min-width: 36px; padding: 0 6px; margin: 1px; }
.zeroviz-controls .widget-toggle-buttons .jupyter-button.mod-active { background: #0072B2; color: #fff; }
.zeroviz-controls :disabled { cursor: not-allowed; }
/* What is typed there is read by stage.js, and where there is none by nobody. */
.zeroviz-explorer:not(:has(.zeroviz-stage)) .zeroviz-controls .widget-readout { pointer-events: none; }
.zeroviz-controls > .zeroviz-dtypes { display: flex; flex-flow: row wrap; gap: 0 4px; overflow: hidden; }
.zeroviz-dtypes > * { margin: 0; }
.zeroviz-dtypes .zeroviz-dtypes-button:enabled { flex: 0 0 85px; height: 28px; line-height: 28px; padding: 0; border: 0;
  text-align: left; background: none; box-shadow: none; color: var(--jp-ui-font-color1, #222); }
.zeroviz-dtypes .zeroviz-dtypes-sum { flex: 1 1 0; }
.zeroviz-dtypes .widget-html-content { font-size: 13px; line-height: 1.35; color: var(--jp-ui-font-color1, #222);
  font-variant-numeric: tabular-nums; }
.zeroviz-dtypes-row { flex: 1 1 100%; display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 0 8px;
  overflow: hidden; padding: 2px; }
.zeroviz-dtypes-row .widget-dropdown { display: flex; flex-flow: column; align-items: stretch; height: auto; margin: 0;
  overflow: hidden; padding: 2px; }
.zeroviz-dtypes-row .widget-dropdown .widget-label { flex: none; width: auto; font-size: 13px; line-height: 20px; }
.zeroviz-dtypes-row .widget-dropdown select { flex: none; width: 100%; }
.zeroviz-dtypes .zeroviz-dtypes-button:focus:not(:focus-visible) { outline: none; }
.zeroviz-dtypes .zeroviz-dtypes-asides { flex: 1 1 100%; padding: 0 4px; }
@container (max-width: 1079px) { .zeroviz-controls > .zeroviz-dtypes:has(> .mod-active) { flex-basis: 100%; } }
.zeroviz-explorer button:focus-visible, .zeroviz-explorer select:focus-visible, .zeroviz-explorer input:focus-visible,
.zeroviz-explorer .noUi-handle:focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.zeroviz-bar { gap: 8px; align-items: center; flex-wrap: wrap; overflow: hidden; padding: 2px; }
.zeroviz-bar button { font-size: 15px; height: 34px; line-height: 34px; }
.zeroviz-bar .zeroviz-run { background: #0072B2; color: #fff; font-weight: 600; }
.zeroviz-bar > .widget-html { flex: 1 1 330px; margin: 0; min-width: 0; }
/* Room for two lines, or the picture would jump with the news. */
.zeroviz-news { font-size: 15px; color: var(--jp-ui-font-color1, #222); line-height: 1.35; min-height: 2.7em; }
.zeroviz-news b { font-weight: 600; }
.zeroviz-error { color: #a30000; font-weight: 600; }
[data-jp-theme-light="false"] .zeroviz-error { color: #ff9e94; }
[data-jp-theme-light="false"] .zeroviz-explorer select { background-image: url("data:image/svg+xml,%3Csvg \
xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E%3Cpath fill='%23ddd' \
d='M5.2 5.9 9 9.7l3.8-3.8 1.2 1.2L9 12.1 4 7.1z'/%3E%3C/svg%3E"); }
.zeroviz-error:not(:empty)::before { content: "\\26A0\\00A0"; }
.zeroviz-notice { color: var(--jp-ui-font-color2, #555); }
.zeroviz-picture-card { background: var(--zv-paper, #fff); border: 1px solid var(--zv-rule, #ccc);
  border-radius: 6px; padding: 4px; overflow: hidden; }
.zeroviz-picture-card .widget-html-content { width: 100%; }
/* As tall as the window lets it be under Lab's own bars, but never so that its 14-point words fall below 13 pixels. */
.zeroviz-pictures { display: flex; flex-flow: column; gap: 6px; min-width: 0; overflow: hidden; }
.zeroviz-drawing { display: block; height: auto; max-height: max(100vh - 160px, var(--points) * 0.93px); }
.zeroviz-drawing text, .zeroviz-drawing rect { pointer-events: none; }
.zeroviz-section { overflow: hidden; }
.zeroviz-stage { display: flex; flex-flow: column; gap: 6px; min-width: 0; }
.zeroviz-stage .zeroviz-closed > :not(.zeroviz-heading), .zeroviz-stage .zeroviz-picture-card:empty,
.zeroviz-still .zeroviz-player, .zeroviz-still .zeroviz-now, .zeroviz-still .zeroviz-now-held { display: none; }
.zeroviz-stage .zeroviz-heading, .zeroviz-intake .zeroviz-heading { border: 0; background: none; font-size: 15px;
  font-weight: 600; padding: 4px 0; text-align: left; color: var(--jp-ui-font-color1, #222); cursor: pointer; }
.zeroviz-stage button:focus-visible, .zeroviz-stage input:focus-visible,
.zeroviz-stage .zeroviz-picture-card:focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.zeroviz-player { display: flex; flex-flow: row wrap; gap: 4px; align-items: center; padding: 3px; }
.zeroviz-player .zeroviz-step { font-size: 15px; min-width: 40px; height: 32px; cursor: pointer;
  border: 1px solid var(--jp-border-color1, #999); border-radius: 4px; background: var(--jp-layout-color1, #fff);
  color: var(--jp-ui-font-color1, #222); }
.zeroviz-player .zeroviz-cursor { flex: 1 1 160px; height: 32px; accent-color: #0072B2; }
/* Room for two lines and one, or the picture would jump from op to op. */
.zeroviz-now { font-size: 16px; line-height: 1.35; min-height: 2.7em; margin: 2px 6px 0; font-weight: 600;
  color: var(--jp-ui-font-color1, #222); }
.zeroviz-now-held { font-size: 14px; line-height: 1.4; min-height: 2.8em; margin: 0 6px 4px;
  color: var(--jp-ui-font-color2, #555); font-variant-numeric: tabular-nums; }
.zeroviz-shortcuts { display: flex; flex-flow: row wrap; gap: 4px 8px; align-items: center; padding: 2px;
  overflow: hidden; }
.zeroviz-shortcuts > .widget-dropdown { flex: 1 1 180px; margin: 0; height: auto; min-height: 32px; width: auto; }
.zeroviz-shortcuts .widget-label { font-size: 14px; text-align: left; flex: 0 0 85px; width: 85px; }
.zeroviz-shortcuts select { font-size: 14px; height: 28px; }
.zeroviz-shortcuts button { width: auto; font-size: 14px; padding: 0 10px; margin: 0; }
.zeroviz-explorer pre { font: 13px / 1.4 var(--jp-code-font-family, monospace), monospace; color: inherit; }
.zeroviz-explorer pre.zeroviz-code { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px; user-select: all;
  color: var(--zv-ink, #1a1a1a); }
.zeroviz-film-card { cursor: col-resize; touch-action: none; }
.zeroviz-stage { position: relative; }
.zeroviz-intake-text { width: 100%; box-sizing: border-box; font: 13px monospace; resize: vertical; }
.zeroviz-intake-row { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; font-size: 13px; }
.zeroviz-change { font-size: 14px; cursor: pointer; padding: 3px 8px; border-radius: 4px; text-align: left;
  border: 1px solid var(--jp-border-color1, #999); background: var(--jp-layout-color1, #fff);
  color: var(--jp-ui-font-color1, #222); white-space: normal; }
.zeroviz-guessing .zeroviz-pictures > *:not(.zeroviz-guess, .zeroviz-stage), .zeroviz-guessing > .zeroviz-tables-box,
.zeroviz-guessing .zeroviz-stage > *:not(.zeroviz-present-bar),
.zeroviz-guessing .zeroviz-notice, .zeroviz-guessing .zeroviz-progress { display: none !important; }
.zeroviz-guess { overflow: hidden; }
.zeroviz-guess:empty { display: none; }
.zeroviz-guessing .zeroviz-stage { min-height: 48px; }
.zeroviz-shortcuts .zeroviz-predict-first.mod-active { background: #0072B2; color: #fff; }
.zeroviz-guess .jupyter-button { font-size: 16px; width: auto; height: 36px; line-height: 36px; padding: 0 14px; }
.zeroviz-guess .zeroviz-guess-number { width: 360px; max-width: 100%; }
.zeroviz-question { font-size: 20px; font-weight: 600; line-height: 1.4; margin: 8px 4px;
  color: var(--jp-ui-font-color1, #222); }
.zeroviz-dropping { outline: 4px dashed #0072B2; outline-offset: -4px; }
.zeroviz-tip { position: absolute; z-index: 20; max-width: 460px; padding: 5px 9px; border-radius: 4px; font-size: 14px;
  line-height: 1.35; background: #222; color: #fff; pointer-events: none; }
.zeroviz-tip[hidden] { display: none; }
/* For a lecture: over the whole window, one picture as large as it goes, type with it. */
.zeroviz-present-bar { position: absolute; right: 9px; top: 9px; z-index: 5; }
.zeroviz-present-bar .zeroviz-step { font-size: 14px; height: 30px; padding: 0 12px; cursor: pointer;
  border-radius: 4px; border: 1px solid var(--jp-border-color1, #999); background: var(--jp-layout-color1, #fff);
  color: var(--jp-ui-font-color1, #222); }
.zeroviz-present-help, .zeroviz-blank { display: none; }
.zeroviz-presenting { position: fixed; inset: 0; width: 100vw; height: 100vh; max-width: none; max-height: none;
  box-sizing: border-box; margin: 0; border: 0; padding: 1vh 1vw; background: var(--zv-paper, #fff);
  color: var(--zv-ink, #1a1a1a); overflow: hidden auto; outline: 0; }
.zeroviz-presenting > *:not(.zeroviz-presented, .zeroviz-present-help, .zeroviz-tip) { display: none; }
.zeroviz-presenting .zeroviz-presented { flex: 1 1 auto; min-height: 0; display: flex; flex-flow: column; border: 0; }
.zeroviz-presenting .zeroviz-heading, .zeroviz-presenting .zeroviz-player { display: none; }
.zeroviz-presenting .zeroviz-picture-card { flex: 1 1 auto; min-height: 0; border: 0; }
.zeroviz-presenting .zeroviz-drawing { width: 100%; height: 100%; max-height: none; }
.zeroviz-presenting .zeroviz-formula-card { overflow: auto; }
.zeroviz-presenting .zeroviz-now { font-size: 2.6vh; color: inherit; min-height: 2.7em; }
.zeroviz-presenting .zeroviz-now-held { font-size: 2vh; color: inherit; }
.zeroviz-presenting .zeroviz-formula { font-size: var(--zv-size, 3.4vh); --jp-ui-font-color1: currentColor;
  --jp-ui-font-color2: currentColor; }
.zeroviz-presenting .zeroviz-formula h4 { font-size: 0.85em; margin-top: 0.5em; }
.zeroviz-presenting .zeroviz-formula h4 small { font-size: 0.85em; }
.zeroviz-presenting .zeroviz-formula th { font-size: 0.66em; width: auto; }
.zeroviz-presenting .zeroviz-formula tr.zeroviz-result td { font-size: 1.1em; }
.zeroviz-presenting .zeroviz-formula tr.zeroviz-result small { font-size: 0.75em; }
.zeroviz-presenting .zeroviz-notes { font-size: 0.66em; margin-left: 0; max-width: none; }
.zeroviz-presenting .zeroviz-meanings { font-size: 0.66em; columns: 3 18em; margin-left: 0; }
.zeroviz-presenting .zeroviz-meanings div { grid-template-columns: 4em 1fr; }
.zeroviz-presenting .zeroviz-meanings dt { font-size: 1.1em; }
.zeroviz-presenting .zeroviz-formula details { display: none; }
/* A wide window has room for the words beside the film, which is larger so. */
@media (min-aspect-ratio: 3/2) {
  .zeroviz-presenting .zeroviz-timeline-section.zeroviz-presented { display: grid; gap: 0 1vw;
    grid-template: auto minmax(0, 1fr) / minmax(0, 1fr) 19vw; }
  .zeroviz-presenting .zeroviz-film-card { grid-area: 1 / 1 / 3 / 2; }
  .zeroviz-presenting .zeroviz-formula { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 2vw; }
  .zeroviz-presenting .zeroviz-formula > * { grid-column: 1 / -1; order: 2; }
  .zeroviz-presenting .zeroviz-formula > .zeroviz-formula-line:is(:first-child, :nth-child(3)) { grid-column: auto;
    order: 1; }
}
.zeroviz-guess:popover-open { position: fixed; inset: 0; width: 100vw; height: 100vh; max-width: none; max-height: none;
  box-sizing: border-box; margin: 0; border: 0; padding: 5vh 5vw; background: var(--zv-paper, #fff); overflow: auto; }
.zeroviz-guess:popover-open .zeroviz-question { font-size: 4.4vh; color: var(--zv-ink, #1a1a1a); }
.zeroviz-guess:popover-open :is(.jupyter-button, .widget-label, input, select) { font-size: 3vh; height: auto;
  line-height: 1.5; }
.zeroviz-guess:popover-open > * { flex: 0 0 auto; }
.zeroviz-guess:popover-open > .zeroviz-row { gap: 2vh 2vw; margin-top: 2vh; }
.zeroviz-guess:popover-open .widget-label { width: auto; margin-right: 1vw; }
.zeroviz-guess:popover-open .jupyter-button { padding: 0 1.5vw; }
.zeroviz-guess:popover-open :is(.zeroviz-asked, .zeroviz-guess-number) { width: auto; height: auto; }
.zeroviz-guess:popover-open .zeroviz-guess-number input { width: 58vh; }
.zeroviz-guess:popover-open > .zeroviz-picture-card { flex: 1 1 auto; min-height: 0; border: 0; }
.zeroviz-guess:popover-open .zeroviz-drawing { max-height: 80vh; width: 100%; }
.zeroviz-presenting .zeroviz-present-help { display: block; font-size: 1.7vh; margin: 0; opacity: 0.75; }
.zeroviz-blanked .zeroviz-blank { display: block !important; position: fixed; inset: 0; background: #000; z-index: 30; }
.zeroviz-moment { pointer-events: none; }
.zeroviz-cursor-line { stroke: #b00060; stroke-width: 2.4; fill: #b00060; }
.zeroviz-lighting [data-category]:not(.zeroviz-lit) { opacity: 0.22; }
.zeroviz-gathered-line { stroke: #b00060; stroke-width: 2.6; fill: none; }
.zeroviz-section .zeroviz-heading { border: 0; color: var(--jp-ui-font-color1, #222); cursor: pointer; font-size: 15px;
  font-weight: 600; text-align: left; width: auto; height: 34px;
  line-height: 34px; align-self: flex-start; background: none; padding: 0 4px; }
.zeroviz-section .zeroviz-heading.mod-active { background: none; box-shadow: none; }
.zeroviz-row { display: flex; flex-flow: row wrap; gap: 2px 22px; align-items: center; overflow: hidden; padding: 2px; }
.zeroviz-row > * { margin: 0; width: auto; height: auto; min-height: 32px; align-items: center; }
.zeroviz-row .widget-label { font-size: 14px; width: auto; margin-right: 8px; }
.zeroviz-row select, .zeroviz-row input { font-size: 14px; height: 28px; }
.zeroviz-row .widget-toggle-buttons { display: flex; flex-flow: row nowrap; }
.zeroviz-row .jupyter-button { font-size: 14px; width: auto; padding: 0 8px; margin: 1px; }
.zeroviz-row .jupyter-button.mod-active { background: #0072B2; color: #fff; }
.zeroviz-section-error { color: #a30000; font-weight: 600; font-size: 15px; margin: 6px; }
.zeroviz-tables { color: var(--jp-ui-font-color1, #222); font-size: 13px; line-height: 1.45; }
.zeroviz-tables .zeroviz-scroll { overflow-x: auto; }
.zeroviz-tables .zeroviz-scroll:has(.zeroviz-memory) { overflow: auto; max-height: 560px; margin-top: 14px; }
.zeroviz-tables table { border-collapse: collapse; margin: 14px 0 0; font-size: 13px; }
.zeroviz-tables .zeroviz-memory { margin-top: 0; }
.zeroviz-tables thead { position: sticky; top: 0; }
.zeroviz-tables caption { text-align: left; font-weight: 600; font-size: 15px; padding: 2px 0 5px; }
.zeroviz-tables th, .zeroviz-tables td { border: 1px solid var(--jp-border-color2, #ccc); padding: 2px 6px;
  text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; max-width: none; }
.zeroviz-tables th { font-weight: 500; text-align: left; vertical-align: top; }
.zeroviz-tables thead th { background: var(--jp-layout-color2, #eee); text-align: center; font-weight: 600; }
.zeroviz-tables tbody tr, .zeroviz-tables tbody tr:hover { background: none; }
.zeroviz-tables .zeroviz-total th, .zeroviz-tables .zeroviz-total td { font-weight: 700; }
.zeroviz-tables tr.zeroviz-total { border-bottom: 2px solid var(--jp-border-color0, #888); }
.zeroviz-tables td.zeroviz-words { text-align: left; white-space: normal; min-width: 96px; max-width: 420px; }
.zeroviz-tables .zeroviz-differences th { white-space: normal; }
.zeroviz-tables td.zeroviz-none { color: var(--jp-ui-font-color2, #777); font-style: italic; }
.zeroviz-tables td.zeroviz-differs { font-weight: 700; }
.zeroviz-tables td.zeroviz-unexplained { font-weight: 700; background: #F0E442; color: #111; }
.zeroviz-tables i { display: inline-block; width: 13px; height: 13px; border: 1px solid #333; margin-right: 7px;
  vertical-align: -2px; }
@container (max-width: 900px) {
  .zeroviz-tables table { font-size: 12px; }
  .zeroviz-tables th, .zeroviz-tables td { padding: 2px 4px; }
  .zeroviz-tables thead th { white-space: normal; }
}
.zeroviz-summary { font-size: 16px; margin: 10px 0 0; font-weight: 600; }
.zeroviz-aside { font-size: 14px; margin: 4px 0 0; }
"""
CSS = f"<style>{_PAGE}{FORMULA}</style>"

# Faults of plain ipywidgets in JupyterLab: a slider's handle has no accessible name and says its position instead of
# its value, news is not announced, and while a control has the focus the notebook takes letters as commands (A adds a
# cell, D D deletes one). Two more:
# - End moves a slider to the end of its first range (noUiSlider keeps the old one for this key), not of its present.
# - A slider's moves are sent one at a time, the next when the kernel has answered, but a press is sent at once. So Run
#   could overtake a move and run a state that is no longer shown. A press is therefore held until the kernel has said
#   (data-controls of the news) that it has what the controls show, for at most 4 s.
ACCESS_JS = """
(() => {
  const mend = () => document.querySelectorAll('.zeroviz-explorer').forEach((root) => {
    root.querySelectorAll('.noUi-handle, button, select, input').forEach((part) => {
      part.dataset.lmSuppressShortcuts = 'true';
    });
    // The element must outlive its text, or a change of it is not announced.
    root.querySelector('.zeroviz-live .widget-html-content')?.setAttribute('role', 'status');
    root.querySelectorAll('.zeroviz-controls > *').forEach((control) => {
      const label = control.querySelector('.widget-label');
      const handle = control.querySelector('.noUi-handle');
      const readout = control.querySelector('.widget-readout');
      if (label && handle) handle.setAttribute('aria-label', label.textContent);
      if (readout && handle) handle.setAttribute('aria-valuetext', readout.textContent);
    });
    root.querySelectorAll('.widget-toggle-button:is(.zeroviz-dtypes-button, .zeroviz-heading)').forEach((part) => {
      part.setAttribute('aria-expanded', part.classList.contains('mod-active'));
    });
  });
  if (window.zerovizMend) return mend();
  window.zerovizMend = mend;

  document.addEventListener('keydown', (event) => {
    const handle = event.target;
    if (event.key !== 'End' || !handle.matches?.('.zeroviz-explorer .noUi-handle')) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    const slider = handle.closest('.noUi-target').noUiSlider;
    slider.set(slider.options.range.max);
  }, true);

  const says = (control) => {
    const box = control.querySelector('input[type=checkbox]');
    if (box) return box.checked ? 'on' : 'off';
    const field = control.querySelector('input[type=text]');
    if (field) return field.value.trim();
    const chosen = control.querySelector('select')?.selectedOptions[0] || control.querySelector('.mod-active');
    return (chosen || control.querySelector('.widget-readout'))?.textContent.replace(/\\s/g, ' ').trim();
  };
  const isSettled = (root) => Object.entries(JSON.parse(root.querySelector('.zeroviz-news').dataset.controls)).every(
    ([name, words]) => says(root.querySelector(`.zeroviz-controls .zeroviz-${name}`)) === words);
  let held = false, passing = false;
  document.addEventListener('click', (event) => {
    const button = event.target.closest?.('.zeroviz-explorer .zeroviz-run');
    const root = button?.closest('.zeroviz-explorer');
    if (!button || passing || (!held && isSettled(root))) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (held) return;
    held = true;
    const since = performance.now();
    const wait = setInterval(() => {
      const isThere = root.isConnected;
      if (isThere && !isSettled(root) && performance.now() - since < 4000) return;
      clearInterval(wait);
      held = false;
      if (!isThere) return;
      passing = true;
      button.click();
      passing = false;
    }, 20);
  }, true);

  let due = false;
  new MutationObserver(() => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; mend(); });
  }).observe(document.body, { childList: true, subtree: true });
  mend();
})();
"""
