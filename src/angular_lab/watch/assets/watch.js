// The page of `angular-lab watch`: the list of runs, their charts, and the view in the address.
// It asks for the list every two seconds, and for curves only where a run has logged more.

const {Chart, clock, colorOf, element, exact, setAddress, short} = LabChart;
const VISIBLE = 2000, HIDDEN = 15000; // milliseconds between two questions
const AUTOMATIC = 8; // runs that are selected unless the user selects
const PARALLEL = 4; // requests at a time
const SPEED = 'tokens_per_second';
const CHARTS = [ // smoothing is for those that are noisy
  {key: 'loss', label: 'training loss', trim: true, noisy: true},
  {key: 'val_loss', label: 'validation loss', trim: true},
  {key: 'angle_mean', label: 'mean angle per step (rad)', log: true},
  {key: 'kappa', label: 'kappa'},
  {key: 'lr', label: 'learning rate'},
  {key: 'grad_norm', label: 'gradient norm', trim: true, noisy: true},
  {key: 'row_norm_mean', label: 'mean row norm'},
  {key: SPEED, label: 'tokens/s', noisy: true},
];
const byId = id => document.getElementById(id);

const runs = new Map(); // id -> what the list shows
const curves = new Map(); // id -> {cursor, stamp, series}
const colors = new Map(); // id -> index, of selected runs
const rows = new Map(); // id -> element of the list
const charts = new Map(); // key -> Chart
const view = {chosen: null, axis: 'steps', smooth: 0, logx: false, logy: {}, zoom: null, sort: 'recent', filter: ''};
let listed = [], sweeps = [], answered = 0;

// -- which runs -------------------------------------------------------------------------------

function words(run) {
  const names = sweeps.filter(sweep => sweep.runs.includes(run.id)).map(sweep => sweep.name);
  return [run.id, run.label, run.optimizer, `lr=${run.lr}`, `seed=${run.seed}`, run.state, run.folder, ...names].join(' ').toLowerCase();
}

function matches(run) {
  const text = words(run);
  return view.filter.toLowerCase().split(/\s+/).every(word => text.includes(word));
}

const ORDERS = {
  recent: (a, b) => (b.state === 'running') - (a.state === 'running') || a.age - b.age,
  loss: (a, b) => (a.best_loss ?? Infinity) - (b.best_loss ?? Infinity),
  name: (a, b) => words(a).localeCompare(words(b), 'en', {numeric: true}),
  progress: (a, b) => b.step / b.steps - a.step / a.steps,
};

function sorted() {
  return [...runs.values()].filter(matches).sort(ORDERS[view.sort]);
}

// Without a choice of the user: of the runs in the list those that train, and the latest others.
function selected() {
  if (view.chosen) return view.chosen.filter(id => runs.has(id));
  return [...runs.values()].filter(matches).sort(ORDERS.recent).slice(0, AUTOMATIC).map(run => run.id);
}

// Each selected run has a colour of its own, if possible that of its optimizer in reports.
function assignColors(ids) {
  for (const id of colors.keys()) if (!ids.includes(id)) colors.delete(id);
  for (const id of ids.filter(id => !colors.has(id))) {
    const taken = new Set(colors.values()), own = runs.get(id).color;
    let free = 0;
    while (taken.has(free)) free += 1;
    colors.set(id, own !== null && !taken.has(own) ? own : free);
  }
}

function choose(ids) {
  view.chosen = ids;
  changed();
}

function toggle(id, isolate) {
  const now = selected(), alone = now.length === 1 && now[0] === id;
  if (isolate) choose(alone ? null : [id]);
  else choose(now.includes(id) ? now.filter(other => other !== id) : [...now, id]);
}

// The shortest names that tell the selected runs apart.
function names(ids) {
  const parts = [run => `${run.optimizer} ${run.lr}`, run => `seed ${run.seed}`, run => run.label, run => `${run.steps} steps`, run => run.id];
  const distinct = map => new Set(map.values()).size;
  let result = new Map(ids.map(id => [id, parts[0](runs.get(id))]));
  for (const part of parts.slice(1)) {
    const longer = new Map(ids.map(id => [id, `${result.get(id)}, ${part(runs.get(id))}`]));
    if (distinct(longer) > distinct(result)) result = longer;
  }
  return result;
}

// -- the list ---------------------------------------------------------------------------------

const lossWords = value => value === null || value === undefined ? '–' : value.toFixed(4);

const title = run => `${run.optimizer} ${run.lr} seed ${run.seed} · ${run.label}`;

// What tells runs with the same title apart: the id, which commands accept, or the folder.
function distinction(run) {
  const [folder] = listed, isBelow = listed.length === 1 && run.id.startsWith(`${folder}/`);
  return isBelow ? run.id.slice(folder.length + 1) : run.id;
}

function makeRow(id) {
  const box = element('input', {type: 'checkbox'});
  const row = element('label', {title: 'Alt or a long press shows only this run'}, box,
    ...['name', 'state', 'which', 'bar', 'detail', 'reason'].map(name => element('span', {class: name})));
  row.querySelector('.bar').append(element('i'));
  box.addEventListener('change', () => toggle(id, false));
  let timer = 0, held = false;
  row.addEventListener('pointerdown', () => {
    held = false;
    timer = setTimeout(() => { held = true; toggle(id, true); }, 500);
  });
  for (const name of ['pointerup', 'pointerleave', 'pointercancel']) row.addEventListener(name, () => clearTimeout(timer));
  row.addEventListener('click', event => {
    if (!held && !event.altKey) return;
    event.preventDefault();
    if (!held) toggle(id, true);
    held = false;
  });
  row.addEventListener('pointerenter', () => focusOn(colors.get(id)));
  row.addEventListener('pointerleave', () => focusOn(null));
  const item = element('li', {'data-run': id}, row);
  rows.set(id, item);
  return item;
}

function fillRow(item, run, isSelected, isAmbiguous) {
  const row = item.firstChild, part = name => row.querySelector(`.${name}`);
  row.className = `${run.state}${isSelected ? ' selected' : ''}`;
  row.firstChild.checked = isSelected;
  row.style.setProperty('--color', isSelected ? colorOf(colors.get(run.id)) : '');
  part('name').replaceChildren(element('b', {}, `${run.optimizer} ${run.lr}`), ` seed ${run.seed} · ${run.label}`);
  part('name').title = run.folder;
  part('which').textContent = isAmbiguous ? distinction(run) : '';
  part('state').textContent = run.state;
  part('bar').firstChild.style.width = `${100 * Math.min(1, run.step / run.steps)}%`;
  const best = run.best_loss !== null && run.best_loss < run.last_loss ? `, best ${lossWords(run.best_loss)}` : '';
  const details = [
    run.state === 'finished' ? `${exact(run.steps)} steps` : `${exact(run.step)}/${exact(run.steps)}`,
    run.last_loss === null ? `loss ${lossWords(run.loss)}` : `val ${lossWords(run.last_loss)}${best}`,
    run[SPEED] ? `${short(Number(run[SPEED].toPrecision(3)))}/s` : '',
    run.state === 'running' ? (run.remaining === null ? 'starting' : `${clock(run.remaining)} left`) : ageWords(run.age),
  ];
  part('detail').replaceChildren(...details.filter(Boolean).map(text => element('span', {}, text)));
  part('detail').title = 'steps; validation loss; tokens per second; time left, or since the last line of the log';
  part('reason').textContent = run.reason;
}

function ageWords(seconds) {
  for (const [size, letter] of [[86400 * 7, 'w'], [86400, 'd'], [3600, 'h'], [60, 'm']]) {
    if (seconds >= size) return `${Math.floor(seconds / size)}${letter}`;
  }
  return `${Math.floor(seconds)}s`;
}

function drawList() {
  const ids = selected(), shown = sorted(), list = byId('runs');
  assignColors(ids);
  const times = new Map();
  for (const run of runs.values()) times.set(title(run), (times.get(title(run)) || 0) + 1);
  for (const run of shown) {
    fillRow(rows.get(run.id) || makeRow(run.id), run, ids.includes(run.id), times.get(title(run)) > 1);
  }
  const items = shown.map(run => rows.get(run.id));
  if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
  byId('shown').textContent = `${ids.length} of ${runs.size} shown`;
  const states = ['running', 'finished', 'stopped', 'failed'];
  const counts = states.map(state => [[...runs.values()].filter(run => run.state === state).length, state]);
  byId('counts').textContent = counts.filter(([count]) => count).map(([count, state]) => `${count} ${state}`).join(' · ');
  const running = counts[0][0];
  document.title = running ? `${running} running · angular-lab` : 'angular-lab watch';
  byId('sort').value = view.sort;
  if (document.activeElement !== byId('filter')) byId('filter').value = view.filter;
  document.querySelector('[data-choose=auto]').setAttribute('aria-pressed', String(!view.chosen));
  drawSweeps();
}

function drawSweeps() {
  byId('sweeps').replaceChildren(...sweeps.map(sweep => {
    const isFilter = view.filter === sweep.name;
    const text = `${sweep.name} · ${sweep.finished} of ${sweep.planned} runs finished${sweep.running ? `, ${sweep.running} running` : ''}`;
    const bar = element('span', {class: 'bar'}, element('i', {style: `width: ${100 * sweep.finished / sweep.planned}%`}));
    const button = element('button', {type: 'button', 'aria-pressed': isFilter, title: 'Show the runs of this sweep only'},
      element('strong', {}, sweep.title), bar, element('small', {}, text));
    button.addEventListener('click', () => { view.filter = isFilter ? '' : sweep.name; changed(); });
    return button;
  }));
}

// -- the charts -------------------------------------------------------------------------------

// The steps of a curve as the chosen axis has them.
function along(id, steps) {
  if (view.axis === 'tokens') return steps.map(step => step * runs.get(id).tokens_per_step);
  if (view.axis === 'steps') return steps;
  const [at, seconds] = curves.get(id).series.seconds || [[], []];
  let i = 0;
  return steps.map(step => {
    while (i < at.length - 1 && at[i] < step) i += 1;
    if (!at.length) return NaN;
    if (at[i] === step || i === 0) return seconds[i];
    return seconds[i - 1] + (seconds[i] - seconds[i - 1]) * Math.min(1, (step - at[i - 1]) / (at[i] - at[i - 1]));
  });
}

function chartData({key, label, log, trim}, ids, called) {
  const traces = ids.filter(id => curves.has(id) && curves.get(id).series[key]).map(id => {
    const [steps, values] = curves.get(id).series[key];
    return {label: called.get(id), kind: 'line', color: colors.get(id), x: along(id, steps), y: values};
  });
  const format = view.axis === 'time' ? 'time' : '';
  const axis = {steps: 'steps', tokens: 'tokens', time: 'training time'}[view.axis];
  return {x: {label: axis, log: false, format}, y: {label, log: Boolean(log), trim: Boolean(trim)}, traces};
}

function drawCharts() {
  const ids = selected(), called = names(ids);
  for (const chart of CHARTS) {
    const data = chartData(chart, ids, called);
    if (!charts.has(chart.key)) {
      const host = element('div', {'data-chart': chart.key});
      byId('charts').append(host);
      const options = {legend: false, tools: ['logY'], height: 250, onChange: shareView, onHover: shareCursor};
      charts.set(chart.key, new Chart(host, data, options));
    }
    const drawn = charts.get(chart.key);
    drawn.host.hidden = !data.traces.length;
    const logY = view.logy[chart.key] ?? Boolean(chart.log);
    Object.assign(drawn.state, {smooth: chart.noisy ? view.smooth : 0, logX: view.logx, logY, zoom: view.zoom});
    drawn.setData(data);
    drawn.markTools();
  }
  drawMessage(ids);
}

// A zoom of one chart is that of all; a log axis is its own.
function shareView(chart) {
  view.zoom = chart.state.zoom;
  for (const {key, log} of CHARTS) {
    if (charts.get(key) !== chart) continue;
    if (chart.state.logY === Boolean(log)) delete view.logy[key]; else view.logy[key] = chart.state.logY;
  }
  changed();
}

function shareCursor(x, from) {
  for (const chart of charts.values()) {
    if (chart === from || chart.host.hidden) continue;
    chart.cursor = x;
    chart.drawCursor();
  }
}

function focusOn(color) {
  for (const chart of charts.values()) {
    chart.focus = color ?? null;
    chart.draw();
  }
}

function drawMessage(ids) {
  const box = byId('message');
  const empty = !runs.size && answered ? ['No runs below ', element('code', {}, listed.join(', ')),
    ' yet. This page waits for them; ', element('code', {}, 'angular-lab train nano'), ' makes one.']
    : runs.size && !ids.length ? ['Select runs in the list.'] : null;
  box.hidden = !empty;
  if (empty) box.replaceChildren(...empty);
  byId('tools').hidden = !runs.size;
}

// -- the address ------------------------------------------------------------------------------

function writeAddress() {
  const parts = new URLSearchParams();
  if (view.chosen) parts.set('runs', view.chosen.join(','));
  if (view.axis !== 'steps') parts.set('x', view.axis);
  if (view.smooth) parts.set('smooth', view.smooth);
  if (view.logx) parts.set('logx', 1);
  const logy = Object.entries(view.logy).map(([key, on]) => `${key}:${Number(on)}`);
  if (logy.length) parts.set('logy', logy.join(','));
  if (view.zoom) parts.set('zoom', view.zoom.join('..'));
  if (view.sort !== 'recent') parts.set('sort', view.sort);
  if (view.filter) parts.set('filter', view.filter);
  setAddress(parts.toString().replaceAll('%2C', ',').replaceAll('%3A', ':'));
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const smooth = Number(parts.get('smooth')), zoom = (parts.get('zoom') || '').split('..').map(Number);
  Object.assign(view, {
    chosen: parts.has('runs') ? parts.get('runs').split(',').filter(Boolean) : null,
    axis: ['tokens', 'time'].includes(parts.get('x')) ? parts.get('x') : 'steps',
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    logx: parts.get('logx') === '1',
    logy: Object.fromEntries((parts.get('logy') || '').split(',').filter(Boolean).map(part => {
      const [key, on] = part.split(':');
      return [key, on === '1'];
    })),
    zoom: zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null,
    sort: parts.get('sort') in ORDERS ? parts.get('sort') : 'recent',
    filter: parts.get('filter') || '',
  });
  markTools();
}

// -- the tools --------------------------------------------------------------------------------

function markTools() {
  document.querySelector(`#axis [value=${view.axis}]`).checked = true;
  byId('smooth').value = view.smooth;
  document.querySelector('#smoothing output').textContent = view.smooth || '0';
  byId('logx').setAttribute('aria-pressed', String(view.logx));
}

// The user has changed the view.
function changed() {
  writeAddress();
  markTools();
  drawList();
  drawCharts();
  fetchCurves();
}

function listen() {
  byId('filter').addEventListener('input', event => { view.filter = event.target.value; changed(); });
  byId('sort').addEventListener('change', event => { view.sort = event.target.value; changed(); });
  byId('smooth').addEventListener('input', event => { view.smooth = Number(event.target.value); changed(); });
  byId('axis').addEventListener('change', event => { Object.assign(view, {axis: event.target.value, zoom: null}); changed(); });
  byId('logx').addEventListener('click', () => { Object.assign(view, {logx: !view.logx, zoom: null}); changed(); });
  byId('reset').addEventListener('click', () => { view.zoom = null; changed(); });
  const first = () => [...charts.values()].find(chart => !chart.host.hidden && chart.box);
  byId('zoomin').addEventListener('click', () => first()?.zoomBy(0.5));
  byId('zoomout').addEventListener('click', () => first()?.zoomBy(2));
  const choices = {
    all: () => sorted().map(run => run.id),
    none: () => [],
    running: () => [...runs.values()].filter(run => run.state === 'running').map(run => run.id),
    auto: () => null,
  };
  byId('choose').addEventListener('click', event => {
    const {choose: name} = event.target.dataset;
    if (name) choose(choices[name]());
  });
  window.addEventListener('hashchange', () => { readAddress(); drawList(); drawCharts(); fetchCurves(); });
  document.addEventListener('visibilitychange', () => { if (!document.hidden) poll(); });
  if (matchMedia('(max-width: 48rem)').matches) byId('side').open = false;
}

// -- the server -------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path), content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function append(id, {restarted, cursor, series}, stamp) {
  const known = restarted || !curves.has(id) ? {} : curves.get(id).series;
  for (const [key, [steps, values]] of Object.entries(series)) {
    const [before, old] = known[key] || [[], []];
    known[key] = [[...before, ...steps], [...old, ...values]];
  }
  curves.set(id, {cursor, stamp, series: known});
}

// Ask for the curves of selected runs that have logged more than the page has.
let fetching = false;
async function fetchCurves() {
  if (fetching) return;
  fetching = true;
  try {
    const isNew = id => runs.has(id) && curves.get(id)?.stamp !== runs.get(id).stamp;
    for (let queue; (queue = selected().filter(isNew)).length;) {
      await Promise.all(queue.slice(0, PARALLEL).map(async id => {
        const {stamp} = runs.get(id), after = curves.get(id)?.cursor || '0';
        append(id, await ask(`api/metrics?run=${encodeURIComponent(id)}&after=${after}`), stamp);
      }));
      drawCharts();
    }
  } finally {
    fetching = false;
  }
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  const live = byId('live');
  try {
    const answer = await ask('api/runs');
    listed = answer.folders;
    sweeps = answer.sweeps;
    answered = Date.now();
    const ids = new Set(answer.runs.map(run => run.id));
    for (const id of runs.keys()) if (!ids.has(id)) { runs.delete(id); rows.delete(id); curves.delete(id); }
    for (const run of answer.runs) runs.set(run.id, run);
    drawList();
    await fetchCurves();
    drawCharts();
    live.className = '';
    live.textContent = 'live';
    live.title = answer.warnings.join('\n');
  } catch (error) {
    live.className = 'lost';
    live.textContent = `not connected (${error.message}): is angular-lab watch still running?`;
  }
  timer = setTimeout(poll, document.hidden ? HIDDEN : VISIBLE);
}

readAddress();
listen();
poll();
