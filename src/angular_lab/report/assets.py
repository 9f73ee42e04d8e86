"""The page's style and script. No network: everything is in the page."""

_LIGHT = """--ink: #1b1b1f; --soft: #5d5d66; --paper: #ffffff; --box: #f6f6f8; --rule: #d9d9df;
--link: #0b5cad; --theirs: #6a4c93; --holds: #1b6e3c; --reversed: #a3260f; --open: #7a5c00;"""
# Okabe and Ito's colours, lighter: the originals are made for white paper.
_DARK = """--ink: #e8e8ec; --soft: #a8a8b3; --paper: #16161a; --box: #202026; --rule: #3a3a44;
--link: #7db8f5; --theirs: #c3a6e8; --holds: #6fd08c; --reversed: #ff8f7a; --open: #e5c04b;
--c0: #4aa8e0; --c1: #f28a3c; --c2: #35c99a; --c3: #e39fc6; --c4: #f0b83c; --c5: #8ccff5;"""

STYLE = f"""
:root {{ color-scheme: light; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{
  :root:not([data-theme=light]) {{ color-scheme: dark; {_DARK} }}
}}
:root[data-theme=dark] {{ color-scheme: dark; {_DARK} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0 auto;
  max-width: 74rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--paper); }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }}
h2 {{ font-size: 1.35rem; margin: 3rem 0 .5rem; padding-top: .7rem;
  border-top: 2px solid var(--rule); }}
h3 {{ font-size: 1.1rem; margin: 2rem 0 .3rem; }}
h4 {{ font-size: 1rem; margin: 1.6rem 0 .2rem; }}
p {{ max-width: 46rem; margin: .5rem 0; }}
a {{ color: var(--link); }}
nav {{ background: var(--box); border-radius: .5rem; padding: .6rem 1rem; margin: 1rem 0; }}
nav ul {{ margin: .2rem 0; padding-left: 1.2rem; }}
.note, figcaption {{ color: var(--soft); font-size: .88rem; line-height: 1.45; }}
.note {{ max-width: 60rem; }}
.figures {{ display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); }}
figure {{ margin: 0; padding: .7rem; min-width: 0; border: 1px solid var(--rule);
  border-radius: .5rem; }}
figure svg {{ display: block; width: 100%; height: auto; max-width: 40rem; margin: 0 auto; }}
figure svg text {{ fill: currentColor;
  font-family: system-ui, -apple-system, "Segoe UI", sans-serif !important; }}
figcaption {{ margin-top: .4rem; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; border: 1px solid var(--rule); border-radius: .5rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; vertical-align: top; }}
tbody tr:last-child td {{ border-bottom: 0; }}
th:first-child, td:first-child, .text, td.long {{ text-align: left; }}
td.long {{ white-space: normal; min-width: 16rem; }}
th {{ background: var(--box); padding: 0; vertical-align: bottom; }}
th button {{ all: unset; box-sizing: border-box; width: 100%; cursor: pointer; font-weight: 600;
  padding: .35rem .6rem; white-space: normal; min-width: 3.4rem; line-height: 1.25; }}
th button:focus-visible, .wide:focus-visible {{ outline: 2px solid var(--link);
  outline-offset: -2px; }}
th[aria-sort=ascending] button::after {{ content: " ▲"; }}
th[aria-sort=descending] button::after {{ content: " ▼"; }}
.best {{ font-weight: 700; }}
.paper {{ color: var(--theirs); font-style: italic; }}
.holds, .reversed, .missed, .inconclusive {{ font-weight: 600; text-align: left; }}
.holds {{ color: var(--holds); }} .reversed, .missed {{ color: var(--reversed); }}
.inconclusive {{ color: var(--open); }}
.warnings {{ border-left: 4px solid var(--open); background: var(--box); border-radius: .3rem;
  padding: .4rem 1rem; margin: 1rem 0; font-size: .9rem; overflow-wrap: anywhere; }}
.warnings ul {{ padding-left: 1.1rem; margin: .3rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
details {{ margin: 1rem 0; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; background: var(--box);
  border: 1px solid var(--rule); border-radius: .4rem; }}
@media (max-width: 40rem) {{ body {{ padding: 1rem .6rem 3rem; }} figure {{ padding: .4rem; }} }}
@media print {{ figure, tr {{ break-inside: avoid; }} }}
"""

# With #selfcheck in the address the page looks at itself and leaves the result in an attribute:
# a test in a headless browser needs no driver.
SCRIPT = """
const errors = [];
window.addEventListener('error', e => errors.push(String(e.message)));
function keyOf(row, i) {
  const cell = row.cells[i], v = cell.dataset.v;
  const text = cell.textContent.trim();
  return v !== undefined ? {n: parseFloat(v), text} : {n: NaN, text: text === '-' ? '' : text};
}
function compare(a, b) {
  if (!a.text || !b.text) return a.text ? -1 : b.text ? 1 : 0;
  const x = isNaN(a.n), y = isNaN(b.n);
  if (!x && !y) return a.n - b.n;
  return x && y ? a.text.localeCompare(b.text) : x ? 1 : -1;
}
function sortBy(th) {
  const table = th.closest('table'), body = table.tBodies[0], i = th.cellIndex;
  const down = th.getAttribute('aria-sort') === 'ascending';
  for (const other of th.parentNode.cells) other.setAttribute('aria-sort', 'none');
  th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const rows = Array.from(body.rows, row => ({row, key: keyOf(row, i)}));
  rows.sort((a, b) => {
    if (!a.key.text || !b.key.text) return compare(a.key, b.key);
    return down ? compare(b.key, a.key) : compare(a.key, b.key);
  });
  body.append(...rows.map(item => item.row));
}
document.addEventListener('click', e => {
  const button = e.target.closest('th button');
  if (button) sortBy(button.parentNode);
});
function sorted(table, i, sign) {
  const keys = Array.from(table.tBodies[0].rows, row => keyOf(row, i)).filter(k => k.text);
  return keys.every((k, j) => j === 0 || sign * compare(keys[j - 1], k) <= 0);
}
function selfCheck() {
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  const hidden = Array.from(document.querySelectorAll('svg')).filter(s => {
    const box = s.getBoundingClientRect();
    return box.width < 50 || box.height < 50 || !s.querySelector('path');
  }).length;
  let clicks = 0, wrong = 0;
  document.querySelectorAll('table').forEach(table => {
    Array.from(table.tHead.rows[0].cells).forEach((th, i) => {
      for (const [state, sign] of [['ascending', 1], ['descending', -1]]) {
        th.firstChild.click();
        clicks += 1;
        if (th.getAttribute('aria-sort') !== state || !sorted(table, i, sign)) wrong += 1;
      }
    });
  });
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const ids = Array.from(document.querySelectorAll('[id]'), e => e.id);
  const lost = Array.from(document.querySelectorAll('nav a'))
    .filter(a => !document.getElementById(a.getAttribute('href').slice(1))).length;
  document.documentElement.dataset.selfcheck = JSON.stringify({
    figures: document.querySelectorAll('svg').length, hidden, clicks, wrong, overflow: wide,
    repeated: ids.length - new Set(ids).size, lost,
    dark: matchMedia('(prefers-color-scheme: dark)').matches, errors});
}
window.addEventListener('load', () => {
  if (location.hash === '#selfcheck') selfCheck();
});
"""
