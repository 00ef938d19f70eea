"""The page's style sheet: light and dark by the reader's preference, from wide screens down to phones."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --quiet: #5b6570; --rule: #dde1e6;
  --c0: #0b62b8; --c1: #c2540a; --c2: #0b7f55; --c3: #b0297c;
  --c4: #6a4fc4; --c5: #8a6d00; --c6: #0a7f91; --c7: #59626c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1b2027; --text: #e6e9ed; --quiet: #a0aab5; --rule: #323943;
    --c0: #6cb2f7; --c1: #f5a35c; --c2: #52c99a; --c3: #f08bbd;
    --c4: #b5a2f5; --c5: #dcc254; --c6: #55c8d8; --c7: #b4bcc5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .8rem; }
p { margin: 0 0 .7rem; }
p:last-child { margin-bottom: 0; }
.lead, .note, footer { color: var(--quiet); }
.lead { margin-bottom: 1.6rem; }
.note { font-weight: normal; }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 1.2rem 1.3rem; margin: 0 0 1.1rem;
}
.findings { margin: 0; padding-left: 1.2rem; max-width: 60rem; }
.findings li + li { margin-top: .45rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .5rem; }
th, td { padding: .42rem .9rem .42rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; font-size: .9rem; color: var(--quiet); }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { color: var(--text); font-size: 1rem; min-width: 8rem; overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.number + :not(.number) { padding-left: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: 1.2rem 1.8rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--quiet); font-size: 12px; }
.grid, .axis, .tick { stroke: var(--rule); fill: none; }
.axis, .tick { stroke: var(--quiet); }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 5 5; }
.mark { fill: currentColor; stroke: var(--card); stroke-width: .8; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.3rem; margin: 0 0 1rem; padding: 0; }
.legend li { display: flex; align-items: center; gap: .5rem; overflow-wrap: anywhere; }
.legend svg { width: 28px; flex: none; }
.pair {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 16rem), 1fr)); gap: 1rem;
  margin: .9rem 0 0;
}
.pair div { border: 1px solid var(--rule); border-radius: 8px; padding: .8rem 1rem; }
.pair dt { color: var(--quiet); }
.pair dd { margin: 0; font-size: 1.7rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: .25rem 1.2rem; margin: 0; }
.facts dt, .name { color: var(--quiet); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--rule); padding-top: .6rem; margin-top: .8rem; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
details .facts { padding-top: .6rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { font-size: .9rem; padding: 0 .2rem; }
@media (max-width: 34rem) {
  main { padding: 1.4rem .7rem 2rem; }
  h1 { font-size: 1.5rem; }
  svg text { font-size: 15px; } /* of a chart that is drawn at four fifths of its size */
  section { padding: 1rem .9rem; }
  .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: .5rem; }
  th, td { padding-right: .7rem; }
}
"""
