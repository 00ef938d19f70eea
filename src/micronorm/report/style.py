"""The page's style sheet: light and dark by the reader's preference, from wide screens down to phones, and on paper."""

from micronorm.report.drawing import LOOKS, Look
from micronorm.report.palette import DARK, LEVELS, LIGHT, RUNS, variables


def plot_rules() -> str:
    """How the roles and colours of drawings look, as rules of a style sheet that defines the palette's variables."""
    names = [*(f"c{k}" for k in range(RUNS)), *(f"s{k}" for k in range(4)), *(f"h{k}" for k in range(LEVELS))]
    colours = "".join(f".{name}{{color:var(--{name})}}" for name in names)
    return colours + "".join(f"svg .{role}{{{_declarations(look)}}}" for role, look in LOOKS.items())


def _declarations(look: Look) -> str:
    def paint(name: str | None) -> str:
        return "none" if name is None else "currentColor" if name == "own" else f"var(--{name})"

    found = f"fill:{paint(look.fill)};stroke:{paint(look.stroke)};stroke-width:{look.width:g}"
    if look.opacity != 1:
        found += f";opacity:{look.opacity:g}"
    if look.dashes:
        found += f";stroke-dasharray:{' '.join(f'{dash:g}' for dash in look.dashes)}"
    return found + ";stroke-linejoin:round;stroke-linecap:round"


_LAYOUT = """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 70rem; margin: 0 auto; padding: 2.4rem 1.2rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; letter-spacing: -.005em; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1.3rem 0 .5rem; }
p { margin: 0 0 .7rem; }
p:last-child { margin-bottom: 0; }
.lead, .note, .about, footer { color: var(--quiet); }
.lead { margin-bottom: 1rem; }
.about { max-width: 46rem; margin-bottom: 1rem; }
.verdict { font-size: 1.2rem; line-height: 1.45; max-width: 52rem; margin: 0 0 1.2rem; }
.note { font-weight: normal; font-size: .88rem; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0 0 1.5rem; font-size: .9rem; }
nav a {
  color: var(--text); text-decoration: none; border: 1px solid var(--rule); border-radius: 99px;
  padding: .15rem .75rem; background: var(--card);
}
nav a:hover { border-color: var(--quiet); }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 1.3rem 1.4rem; margin: 0 0 1.1rem; scroll-margin-top: 1rem;
}
section.absent { background: none; border-style: dashed; padding: .9rem 1.4rem; color: var(--quiet); }
section.absent h2 { font-size: 1rem; margin: 0 0 .15rem; }
.findings { margin: 0; padding-left: 1.2rem; max-width: 60rem; }
.findings li + li { margin-top: .45rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; overflow-wrap: break-word; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .9rem .45rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; font-size: .88rem; color: var(--quiet); }
tbody tr:last-child > * { border-bottom: 0; }
tbody th {
  color: var(--text); font-size: 1rem; min-width: 8rem; overflow-wrap: anywhere;
  position: sticky; left: 0; background: var(--card);
}
td:not(.number) { min-width: 5rem; }
td:last-child:not(.number) { min-width: 9rem; }
th:has(> .dot) { padding-left: 1.3em; }
th > .dot { position: absolute; left: 0; top: .95em; }
.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.number + :not(.number) { padding-left: .9rem; }
.dot {
  display: inline-block; width: .65em; height: .65em; border-radius: 50%; background: currentColor;
  margin-right: .55em; flex: none;
}
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: 1.6rem 2rem; }
.charts + h3, .charts + .scroll { margin-top: 1.4rem; }
figure { margin: 0; min-width: 0; max-width: 40rem; }
figcaption { font-weight: 600; line-height: 1.35; margin-bottom: .45rem; }
figcaption .note { display: block; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg { touch-action: pan-y; }
svg text { font-size: 12px; }
svg .cursor { stroke: var(--quiet); stroke-dasharray: 2 3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.4rem; margin: 0 0 1.1rem; padding: 0; }
.legend li { display: flex; align-items: center; gap: .5rem; }
.legend li { font-size: .95rem; }
.legend svg { width: 26px; flex: none; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); gap: .9rem;
  margin: 0 0 1.2rem;
}
.tiles:last-child { margin-bottom: 0; }
.tiles div { border: 1px solid var(--rule); border-radius: 9px; padding: .75rem 1rem; }
.tiles dt { color: var(--quiet); font-size: .9rem; }
.tiles dd { margin: 0; font-size: 1.55rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; }
.samples {
  max-width: 44rem; list-style: none; display: grid; grid-template-columns: repeat(8, minmax(0, 1fr)); gap: .9rem .7rem;
  margin: 0; padding: 0; text-align: center; line-height: 1.25;
}
.samples img {
  display: block; width: 100%; max-width: 6rem; margin: 0 auto .3rem; border-radius: 5px; image-rendering: pixelated;
  border: 2px solid transparent;
}
.samples small { color: var(--quiet); }
.wrong img { border-color: var(--bad); }
.wrong span { color: var(--bad); }
.wrong .dot { margin-right: .3em; }
.legend .dot { margin-right: 0; }
.facts { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: .3rem 1.2rem; margin: 0; }
.facts dt, .name { color: var(--quiet); }
.facts dd { margin: 0; }
details { border-top: 1px solid var(--rule); padding-top: .6rem; margin-top: .8rem; }
summary { cursor: pointer; font-weight: 600; }
details .facts { padding-top: .6rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { font-size: .9rem; padding: 0 .2rem; }
.tip {
  position: fixed; z-index: 1; pointer-events: none; max-width: min(22rem, 90vw); padding: .45rem .65rem;
  background: var(--text); color: var(--card); border-radius: 7px; font-size: .82rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
.tip[hidden] { display: none; }
.tip div { display: flex; align-items: center; }
.tip .dot { box-shadow: 0 0 0 1.5px var(--card); }
@media (max-width: 34rem) {
  main { padding: 1.3rem .7rem 2rem; }
  h1 { font-size: 1.55rem; }
  .verdict { font-size: 1.08rem; }
  svg text { font-size: 14.5px; } /* of a chart that is drawn at three quarters of its size */
  section { padding: 1rem .9rem; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: .5rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles dd { font-size: 1.25rem; }
  th, td { padding-right: .7rem; }
  tbody th { min-width: 7rem; padding-right: .5rem; }
  .samples { grid-template-columns: repeat(4, 1fr); }
}
@media print {
  :root { color-scheme: light; }
  body { background: none; font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  nav, .tip { display: none; }
  section { border: 0; border-top: 1px solid var(--rule); border-radius: 0; padding: .9rem 0; margin: 0; }
  figure, tr, .samples li, .tiles { break-inside: avoid; }
  h2, h3, .about, .legend { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; }
  details::details-content { content-visibility: visible; block-size: auto; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

STYLE = (
    f":root{{color-scheme:light dark;{variables(LIGHT)}}}"
    f"@media screen and (prefers-color-scheme: dark){{:root{{{variables(DARK)}}}}}"
    f"{plot_rules()}{_LAYOUT}"
)
