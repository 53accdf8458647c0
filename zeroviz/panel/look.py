"""What the page needs beside widgets: a style sheet, and what plain widgets leave out for keys and screen readers."""

from __future__ import annotations

CSS = """<style>
.zeroviz-explorer { max-width: 1400px; }
.zeroviz-controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 1px 24px;
  grid-auto-flow: row dense; padding: 2px 0 6px; overflow: hidden; }
.zeroviz-controls .widget-toggle-buttons { grid-column: span 2; }
.zeroviz-controls > * { min-height: 34px; margin: 0; align-items: center; }
.zeroviz-controls .widget-label { font-size: 14px; text-align: left; flex: 0 0 92px; width: 92px; }
.zeroviz-controls .widget-toggle-buttons { display: flex; flex-flow: row nowrap; }
.zeroviz-controls .widget-checkbox .widget-label-basic { font-size: 14px; }
.zeroviz-controls .widget-toggle-buttons button, .zeroviz-controls .jupyter-button { font-size: 14px; }
.zeroviz-controls .widget-toggle-buttons .jupyter-button { width: auto; min-width: 62px; padding: 0 11px; }
.zeroviz-controls .widget-toggle-buttons .jupyter-button.mod-active { background: #0072B2; color: #fff;
  font-weight: 600; }
.zeroviz-controls :disabled { cursor: not-allowed; }
.zeroviz-explorer button:focus-visible, .zeroviz-explorer select:focus-visible, .zeroviz-explorer input:focus-visible,
.zeroviz-explorer .noUi-handle:focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.zeroviz-bar { gap: 8px; align-items: center; flex-wrap: wrap; overflow: hidden; padding: 2px; }
.zeroviz-bar button { font-size: 15px; height: 34px; line-height: 34px; }
.zeroviz-bar .zeroviz-run { background: #0072B2; color: #fff; font-weight: 600; }
.zeroviz-news { font-size: 15px; color: var(--jp-ui-font-color1, #222); line-height: 1.4; }
.zeroviz-news b { font-weight: 600; }
.zeroviz-error { color: var(--jp-error-color0, #a30000); font-weight: 600; }
.zeroviz-error:not(:empty)::before { content: "\\26A0\\00A0"; }
.zeroviz-notice { color: var(--jp-ui-font-color2, #555); }
.zeroviz-picture-card { background: #fff; border: 1px solid #ccc; border-radius: 6px; padding: 4px; overflow: hidden; }
.zeroviz-picture-card .widget-html-content { width: 100%; }
.zeroviz-picture { display: block; height: auto; }
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
.zeroviz-tables td.zeroviz-none { color: var(--jp-ui-font-color2, #777); font-style: italic; }
.zeroviz-tables td.zeroviz-differs { font-weight: 700; }
.zeroviz-tables td.zeroviz-unexplained { font-weight: 700; background: #F0E442; color: #111; }
.zeroviz-tables i { display: inline-block; width: 13px; height: 13px; border: 1px solid #333; margin-right: 7px;
  vertical-align: -2px; }
.zeroviz-summary { font-size: 16px; margin: 10px 0 0; font-weight: 600; }
</style>"""

# Faults of plain ipywidgets in JupyterLab: a slider's handle has no accessible name and says its position instead of
# its value, news is not announced, and while a control has the focus the notebook takes letters as commands (A adds a
# cell, D D deletes one).
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
  });
  if (window.zerovizMend) return mend();
  window.zerovizMend = mend;
  let due = false;
  new MutationObserver(() => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; mend(); });
  }).observe(document.body, { childList: true, subtree: true });
  mend();
})();
"""
