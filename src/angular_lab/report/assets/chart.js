// Interactive charts, for reports and for the page of `angular-lab watch`.
//
// A report holds the data of each figure as JSON next to its picture (charts.py); the picture stays
// for pages without JavaScript and for paper. `Chart` draws the data, `Figures` ties the charts of
// a report to the address of the page. Colours are the page's CSS variables.

const LabChart = (() => {
  const COLORS = 7; // the last one is the colour of text; then they repeat, with other dashes
  const DASHES = ['', '6 2.5', '1.5 2.5', '9 2.5 2 2.5'];
  const LINES = ['line', 'branch', 'dots', 'prediction'];
  const STUB = 24; // pixels: a curve that is narrower shows its last point
  const FEW = 24; // a curve of at most this many points shows them
  const ROWS = 14; // of a tooltip
  const NARROW = 400; // pixels: below, there is no room for a tooltip next to the crosshair
  const WHAT = {branch: 'branch', prediction: 'theory', best: 'best', diverged: 'diverged'};
  const WIDE = 480, LONGEST = 17, LETTERS = 13; // pixels, letters, pixels: names at the ends of curves
  const LONG_PRESS = 500; // milliseconds
  const SOON = 150; // milliseconds until the address follows the view
  const DRAG = 6; // pixels: less is a click

  // -- numbers ------------------------------------------------------------------------------

  const minus = text => text.replace('-', '−');

  function short(value, digits = 4) {
    for (const [size, letter] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']]) {
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(digits)) + letter;
    }
    if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2).replace(/\.?0+e/, 'e');
    return String(Number(value.toPrecision(4)));
  }

  function exact(value) {
    if (Number.isInteger(value)) return value.toLocaleString('en');
    if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString('en');
    if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(3);
    return value.toPrecision(5);
  }

  function clock(seconds) {
    const [h, m, s] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
    const pad = number => String(number).padStart(2, '0');
    return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)}`;
  }

  function linearTicks(low, high, count, sizes = [1, 2, 5, 10]) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = sizes.find(size => size * power >= raw * 0.999) * power;
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({length: last - first + 1}, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }

  function logTicks(low, high, count) {
    const decades = Math.log10(high / low);
    if (decades < 0.5) return linearTicks(low, high, count).filter(value => value > 0);
    const every = Math.max(1, Math.ceil(decades / count));
    const parts = decades * 3 <= count + 2 ? [1, 2, 5] : decades * 2 <= count + 2 ? [1, 3] : [1];
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e += 1) {
      if (e % every === 0) for (const part of parts) ticks.push(Number(`${part}e${e}`));
    }
    return ticks.filter(value => value >= low * 0.999 && value <= high * 1.001);
  }

  // Seconds: 15 s, 5 min, 3 h rather than 20,000.
  function timeTicks(low, high, count) {
    const steps = [1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86400];
    const step = steps.find(size => (high - low) / size <= count);
    if (!step) return linearTicks(low, high, count);
    const first = Math.ceil(low / step), last = Math.floor(high / step);
    return Array.from({length: last - first + 1}, (_, i) => (first + i) * step);
  }

  // A map from values to pixels, and back.
  function scale([low, high], [from, to], log) {
    const forward = log ? Math.log10 : value => value, back = log ? value => 10 ** value : value => value;
    const a = forward(low), size = forward(high) - a || 1;
    const map = value => from + (to - from) * (forward(value) - a) / size;
    map.invert = pixel => back(a + size * (pixel - from) / (to - from));
    return map;
  }

  // Exponential smoothing with the bias of the start removed; null stays a gap.
  function smooth(ys, weight) {
    let sum = 0, norm = 0;
    return ys.map(y => {
      if (y === null) return null;
      sum = weight * sum + (1 - weight) * y;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // The index of the first x that is not below the value; xs ascend.
  function lowerBound(xs, value) {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  }

  // The path of a curve: at most four points per pixel, which keep its minima and maxima.
  function linePath(xs, ys, sx, sy, [low, high]) {
    const start = Math.max(0, lowerBound(xs, low) - 1);
    const end = Math.min(xs.length, lowerBound(xs, high) + 2);
    const crowded = end - start > 2 * Math.abs(sx(high) - sx(low));
    let path = '', pen = 'M', column = [], at = null;
    const draw = i => {
      path += `${pen}${sx(xs[i]).toFixed(1)} ${sy(ys[i]).toFixed(1)}`;
      pen = 'L';
    };
    const flush = () => {
      if (!column.length) return;
      const by = (a, b) => ys[a] - ys[b], sorted = [...column].sort(by);
      const kept = [column[0], sorted[0], sorted[sorted.length - 1], column[column.length - 1]];
      for (const i of [...new Set(kept)].sort((a, b) => a - b)) draw(i);
      column = [];
    };
    for (let i = start; i < end; i += 1) {
      const drawable = ys[i] !== null && isFinite(sx(xs[i])) && isFinite(sy(ys[i]));
      if (!drawable) { flush(); pen = 'M'; continue; }
      if (!crowded) { draw(i); continue; }
      const pixel = Math.floor(sx(xs[i]));
      if (pixel !== at) { flush(); at = pixel; }
      column.push(i);
    }
    flush();
    return path;
  }

  // -- elements -----------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  function shape(parent, name, attributes = {}, text = '') {
    const node = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    parent.append(node);
    return node;
  }

  const colorOf = index => index % COLORS === COLORS - 1 ? 'var(--ink)' : `var(--c${index % COLORS})`;
  const dashOf = index => DASHES[Math.floor(index / COLORS) % DASHES.length];

  const MARKS = {
    ring: r => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    star: r => Array.from({length: 10}, (_, i) => {
      const size = i % 2 ? r * 0.42 : r, angle = Math.PI * (i / 5 - 0.5);
      return `${i ? 'L' : 'M'}${(size * Math.cos(angle)).toFixed(1)} ${(size * Math.sin(angle)).toFixed(1)}`;
    }).join('') + 'Z',
    cross: r => `M${-r} ${-r}L${r} ${r}M${-r} ${r}L${r} ${-r}`,
    left: r => `M${-r} 0L${r} ${-r}L${r} ${r}Z`,
    right: r => `M${r} 0L${-r} ${-r}L${-r} ${r}Z`,
  };
  const MARK_OF = {
    points: ['ring', 3.5, false], open: ['ring', 4, false], settled: ['ring', 4, true],
    best: ['star', 8, true], diverged: ['cross', 4, false], dots: ['ring', 2.5, true],
    cut_low: ['left', 4, true], cut_high: ['right', 4, true], line: ['ring', 2, true],
    branch: ['ring', 2.2, true],
  };

  let clips = 0; // ids of clip paths are unique on a page

  // -- a chart ------------------------------------------------------------------------------

  class Chart {
    // options: label (for screen readers), legend (false: the page has its own), tools (which ones;
    // without it all), height, onChange(chart) when the view changes by hand, onHover(x or null, chart)
    constructor(host, data, options = {}) {
      this.options = options;
      this.defaults = {hidden: [], smooth: 0, logX: data.x.log, logY: data.y.log, zoom: null};
      this.state = {...this.defaults};
      this.pointers = new Map();
      this.cursor = this.brush = this.focus = null;
      this.host = host;
      host.classList.add('chart');
      this.head = element('div', {class: 'chart-head'});
      this.plot = element('div', {class: 'chart-plot'});
      this.tip = element('div', {class: 'chart-tip', role: 'tooltip', hidden: ''});
      this.svg = shape(this.plot, 'svg', {tabindex: 0, role: 'img', 'aria-label': options.label || data.y.label});
      this.plot.append(this.tip);
      this.legend = element('div', {class: 'chart-legend', role: 'group', 'aria-label': 'Series'});
      this.tools = element('div', {class: 'chart-tools', role: 'group', 'aria-label': 'View'});
      host.append(this.head, this.plot, element('div', {class: 'chart-foot'}, this.legend, this.tools));
      this.setData(data);
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    setData(data) {
      const changed = !this.data || data.traces.length !== this.data.traces.length ||
        data.traces.some((trace, i) => trace.label !== this.data.traces[i].label);
      this.data = data;
      this.rows = data.y.names && data.y.names.length ? data.y.names : null;
      if (changed) {
        this.series = this.grouped(data.traces);
        if (this.options.legend !== false) this.drawLegend();
        if (!this.rows) this.drawTools();
      } else {
        this.series.forEach((series, i) => { series.traces = this.grouped(data.traces)[i].traces; });
      }
      this.draw();
    }

    // Traces of one colour are one series: a trunk and its branches, runs and their mean.
    grouped(traces) {
      const groups = new Map();
      for (const trace of traces) {
        if (!groups.has(trace.color)) groups.set(trace.color, {color: trace.color, name: '', traces: []});
        const group = groups.get(trace.color);
        group.traces.push(trace);
        if (trace.label && trace.kind !== 'diverged') group.name = group.name || trace.label;
      }
      for (const group of groups.values()) {
        group.name = group.name || group.traces.map(trace => trace.label).find(Boolean) || `series ${group.color}`;
      }
      return [...groups.values()];
    }

    get visible() {
      return this.series.filter(series => !this.state.hidden.includes(series.name));
    }

    // Change the view; `quiet` for a change that did not come from this chart's user.
    set(changes, quiet = false) {
      Object.assign(this.state, changes);
      if (this.options.legend !== false) this.markLegend();
      this.markTools();
      this.draw();
      if (!quiet && this.options.onChange) this.options.onChange(this);
    }

    toggle(name, isolate) {
      const names = this.series.map(series => series.name), hidden = this.state.hidden;
      if (!isolate) {
        this.set({hidden: hidden.includes(name) ? hidden.filter(other => other !== name) : [...hidden, name]});
      } else {
        const others = names.filter(other => other !== name);
        const isAlone = !hidden.includes(name) && others.every(other => hidden.includes(other));
        this.set({hidden: isAlone ? [] : others});
      }
    }

    // -- ranges -------------------------------------------------------------------------------

    ys(trace) {
      const {smooth: weight} = this.state;
      if (!weight || trace.kind !== 'line' || trace.x.length < 3) return trace.y;
      if (!trace.smoothed || trace.smoothed.weight !== weight) {
        trace.smoothed = {weight, ys: smooth(trace.y, weight)};
      }
      return trace.smoothed.ys;
    }

    xRange() {
      if (this.state.zoom) return this.state.zoom;
      const {limits} = this.data.x, log = this.state.logX;
      if (limits) return limits;
      let low = Infinity, high = -Infinity, curves = false;
      for (const {traces} of this.visible) {
        for (const trace of traces) {
          curves = curves || trace.kind === 'line';
          for (const x of trace.x) {
            if (log && x <= 0) continue;
            low = Math.min(low, x); high = Math.max(high, x);
          }
        }
      }
      if (low > high) return log ? [1, 10] : [0, 1];
      return widen(low, high, log, curves && !log ? 0.012 : 0.04);
    }

    yRange([from, to]) {
      if (this.rows) return [this.rows.length - 0.5, -0.5];
      const log = this.state.logY, late = this.trimmed(from, to);
      let low = Infinity, high = -Infinity;
      for (const {traces} of this.visible) {
        for (const trace of traces) {
          if (trace.kind === 'diverged') continue;
          const ys = this.ys(trace);
          trace.x.forEach((x, i) => {
            const y = ys[i];
            if (x < from || x > to || y === null || y === undefined || (log && y <= 0)) return;
            low = Math.min(low, y);
            if (x >= late) high = Math.max(high, y);
          });
          high = Math.max(high, this.ending(trace, ys, from, to, log));
        }
      }
      if (low > high) high = low;
      if (!isFinite(low)) return log ? [0.1, 1] : [0, 1];
      const {top, bottom} = this.data.y, range = widen(low, high, log, 0.05);
      if (this.state.zoom || log !== this.data.y.log) return range;
      return [bottom ?? range[0], top !== null && top !== undefined && top < range[1] ? top : range[1]];
    }

    // A run that ended in the first tenth is visible, too: at its end, or where it began to diverge.
    ending(trace, ys, from, to, log) {
      const shown = ys.filter((y, i) => trace.x[i] >= from && trace.x[i] <= to && isFinite(y ?? NaN) && !(log && y <= 0));
      return shown.length ? Math.min(shown[0], shown.at(-1)) : -Infinity;
    }

    // With `trim`, values of the first tenth do not squeeze the others, as in a report.
    trimmed(from, to) {
      const trims = this.data.y.trim && !this.state.zoom && !this.state.logX && !this.state.logY;
      return trims ? from + 0.1 * (to - from) : -Infinity;
    }

    // -- drawing ------------------------------------------------------------------------------

    draw() {
      if (this.pending) return;
      this.pending = true;
      requestAnimationFrame(() => { this.pending = false; this.drawNow(); });
    }

    drawNow() {
      const width = this.plot.clientWidth;
      if (!width) return; // in a closed fold: drawn when it opens
      const {x, y} = this.data, {logX, logY} = this.state;
      const height = this.rows ? 52 + 24 * this.rows.length
        : this.options.height || Math.max(210, Math.min(340, Math.round(width * 0.56)));
      const xs = this.xRange(), ys = this.yRange(xs);
      const yTicks = this.rows ? this.rows.map((_, i) => i)
        : logY ? logTicks(...ys, height / 42) : linearTicks(...ys, height / 40);
      const isHeading = value => this.rows && (y.headings || []).includes(value);
      const yTexts = yTicks.map(value => !this.rows ? short(value) : isHeading(value) ? '' : this.rows[value]).map(minus);
      const widest = Math.max(...yTexts.map(text => text.length), 2);
      const left = Math.min(Math.ceil(widest * 6.4) + 12, width * 0.42);
      const notes = Math.max(0, ...(y.notes || []).map(note => note.length));
      const ends = this.namesAtEnds(width), longest = Math.max(0, ...ends.map(series => series.name.length));
      const aside = notes ? notes * 6.4 + 6 : longest * 7.4;
      const box = {left, right: width - 12 - aside, top: 8, bottom: height - 36};
      this.box = box;
      this.sx = scale(xs, [box.left, box.right], logX);
      this.sy = scale(ys, [box.bottom, box.top], logY && !this.rows);
      this.range = xs;
      this.svg.replaceChildren();
      this.svg.setAttribute('width', width);
      this.svg.setAttribute('height', height);
      this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
      this.drawAxes(xs, yTicks, yTexts, width, height);
      this.drawTraces();
      this.drawEnds(ends);
      this.over = shape(this.svg, 'g', {class: 'over', 'pointer-events': 'none'});
      this.drawCursor();
      this.head.textContent = this.rows ? '' : `${y.label}${logY ? ', log' : ''}`;
      this.xText.textContent = `${x.label.replace(/ \(log\)$/, '')}${logX ? ', log' : ''}`;
    }

    xTicks([low, high], count) {
      const {x} = this.data;
      if (x.ticks && x.ticks.length && this.state.logX === x.log && !this.state.zoom) return x.ticks;
      if (this.state.logX) return logTicks(low, high, 1.6 * count);
      return x.format === 'time' ? timeTicks(low, high, count) : linearTicks(low, high, count);
    }

    drawAxes(xs, yTicks, yTexts, width, height) {
      const {box} = this, grid = shape(this.svg, 'g', {class: 'grid'});
      const words = shape(this.svg, 'g', {class: 'ticks'});
      const {band} = this.data.x;
      if (band !== null && band !== undefined) {
        const from = Math.max(box.left, this.sx(-band)), to = Math.min(box.right, this.sx(band));
        for (const [top, bottom] of this.stretches()) {
          shape(grid, 'rect', {class: 'band', x: from, y: top, width: to - from, height: bottom - top});
          shape(grid, 'path', {class: 'zero', d: `M${this.sx(0)} ${top}V${bottom}`});
        }
      }
      yTicks.forEach((value, i) => {
        const y = this.sy(value).toFixed(1);
        if (this.rows && !yTexts[i]) return; // a heading
        shape(grid, 'path', {d: `M${box.left} ${y}H${box.right}`});
        const room = Math.floor((box.left - 8) / 6.4), text = yTexts[i];
        const label = shape(words, 'text', {x: box.left - 7, y, dy: '.33em', 'text-anchor': 'end'},
          text.length > room + 1 ? `${text.slice(0, room)}…` : text);
        if (text.length > room + 1) shape(label, 'title', {}, text);
      });
      this.drawNotes(words);
      const given = (this.data.x.ticks || []).length > 0 && !this.state.zoom; // settings, horizons
      const show = this.data.x.format === 'time' ? clock : value => short(value, given ? 3 : 4);
      let last = -Infinity;
      for (const value of this.xTicks(xs, Math.max(2, (box.right - box.left) / 85))) {
        const x = this.sx(value), text = minus(show(value)), half = text.length * 3.4;
        if (x < box.left - 1 || x > box.right + 1 || x - half < last + 6) continue;
        shape(grid, 'path', {d: `M${x.toFixed(1)} ${box.bottom}v4`, class: 'tick'});
        const at = Math.min(x, width - half - 1);
        shape(words, 'text', {x: at.toFixed(1), y: box.bottom + 17, 'text-anchor': 'middle'}, text);
        last = at + half;
      }
      shape(grid, 'path', {class: 'axis', d: `M${box.left} ${box.bottom}H${box.right}`});
      this.xText = shape(words, 'text', {x: box.right, y: height - 3, 'text-anchor': 'end', class: 'name'});
    }

    // From where to where there are rows other than headings, which the band must not cross.
    stretches() {
      const edges = [-1, ...(this.data.y.headings || []), this.rows.length];
      return edges.slice(1).map((end, i) => [edges[i] + 0.5, end - 0.5])
        .filter(([top, bottom]) => bottom > top).map(ends => ends.map(row => this.sy(row)));
    }

    // What rows have in addition to their names: headings across, and notes at the right end.
    drawNotes(words) {
      const {headings = [], notes = []} = this.data.y;
      for (const row of headings) {
        shape(words, 'text', {class: 'heading', x: 2, y: this.sy(row), dy: '.4em'}, this.rows[row]);
      }
      notes.forEach((note, row) => {
        if (note) shape(words, 'text', {x: this.box.right + 8, y: this.sy(row), dy: '.33em'}, note);
      });
    }

    // The series whose names stand at the ends of their curves: all, if there is room for them and
    // the curves end at the right.
    namesAtEnds(width) {
      const curves = this.visible.filter(({traces}) => traces.some(trace => LINES.includes(trace.kind) && trace.label));
      const right = scale(this.xRange(), [0, 1], this.state.logX);
      const last = series => Math.max(...series.traces.filter(trace => trace.kind !== 'prediction').flatMap(trace => trace.x));
      const fits = curves.every(series => series.name.length <= LONGEST && right(last(series)) > 0.75);
      return !this.rows && width >= WIDE && fits && curves.length <= COLORS ? curves : [];
    }

    drawEnds(ends) {
      const {box, range: [low, high]} = this, placed = [];
      for (const series of ends) {
        let last = -Infinity, y = null;
        for (const trace of series.traces.filter(trace => ['line', 'branch', 'dots'].includes(trace.kind))) {
          trace.x.forEach((x, i) => {
            const value = this.ys(trace)[i];
            if (x >= low && x <= high && x >= last && value !== null && isFinite(this.sy(value))) { last = x; y = this.sy(value); }
          });
        }
        if (y !== null) placed.push({series, y: Math.max(box.top + 4, Math.min(box.bottom - 4, y))});
      }
      placed.sort((a, b) => a.y - b.y);
      placed.forEach((item, i) => { if (i) item.y = Math.max(item.y, placed[i - 1].y + LETTERS); });
      placed.reverse().forEach((item, i) => { item.y = Math.min(item.y, i ? placed[i - 1].y - LETTERS : box.bottom); });
      for (const {series, y} of placed) {
        shape(this.svg, 'text', {class: 'end', x: box.right + 7, y: y.toFixed(1), dy: '.33em',
          style: `fill: ${colorOf(series.color)}`}, series.name);
      }
    }

    drawTraces() {
      const {box} = this, id = `chart-clip-${clips += 1}`;
      const clip = shape(this.svg, 'clipPath', {id});
      shape(clip, 'rect', {x: box.left - 1, y: box.top - 4, width: box.right - box.left + 2, height: box.bottom - box.top + 5});
      const layer = shape(this.svg, 'g', {'clip-path': `url(#${id})`, class: 'traces'});
      for (const series of this.visible) {
        const group = shape(layer, 'g', {
          style: `color: ${colorOf(series.color)}`, class: 'series', 'data-series': series.name,
        });
        if (this.focus !== null) group.classList.add(this.focus === series.color ? 'focus' : 'dim');
        for (const trace of series.traces) this.drawTrace(group, trace);
      }
    }

    drawTrace(group, trace) {
      const ys = this.ys(trace), {sx, sy} = this;
      if (LINES.includes(trace.kind)) {
        const dash = trace.kind === 'prediction' ? '4 3' : dashOf(trace.color);
        if (ys !== trace.y) {
          shape(group, 'path', {d: linePath(trace.x, trace.y, sx, sy, this.range), class: 'raw'});
        }
        shape(group, 'path', {
          d: linePath(trace.x, ys, sx, sy, this.range), class: `curve ${trace.kind}`,
          ...(dash ? {'stroke-dasharray': dash} : {}),
        });
      }
      (trace.spans || []).forEach(([low, high], i) => {
        shape(group, 'path', {class: 'whisker', d: `M${sx(low)} ${sy(trace.y[i])}H${sx(high)}`});
      });
      for (const i of this.marked(trace)) {
        const y = trace.kind === 'diverged' ? this.box.top + 8 : ys[i] === null ? NaN : sy(ys[i]);
        if (isFinite(y) && isFinite(sx(trace.x[i]))) this.mark(group, trace.kind, sx(trace.x[i]), y);
      }
    }

    // The indices of points that have a mark.
    marked(trace) {
      if (trace.kind === 'prediction') return [];
      const all = trace.x.map((_, i) => i);
      if (trace.kind === 'branch') return all.slice(-1);
      if (trace.kind !== 'line') return all;
      const inside = all.filter(i => trace.x[i] >= this.range[0] && trace.x[i] <= this.range[1]);
      if (inside.length <= FEW) return inside;
      const [first, last] = [inside[0], inside.at(-1)].map(i => this.sx(trace.x[i]));
      return last - first < STUB ? inside.slice(-1) : []; // its curve is hardly visible
    }

    mark(group, kind, x, y, more = 0) {
      const [name, size, filled] = MARK_OF[kind] || MARK_OF.line;
      return shape(group, 'path', {
        d: MARKS[name](size + more), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
        class: filled ? 'mark filled' : 'mark',
      });
    }

    // -- hover --------------------------------------------------------------------------------

    // The x of a point that is nearest to a pixel, among all visible series.
    nearest(pixel) {
      let best = null, distance = Infinity;
      for (const {traces} of this.visible) {
        for (const trace of traces) {
          const i = lowerBound(trace.x, this.sx.invert(pixel));
          for (const j of [i - 1, i]) {
            if (j === 0 && trace.kind === 'branch') continue; // a point of the trunk
            const x = trace.x[j], off = x === undefined ? NaN : Math.abs(this.sx(x) - pixel);
            if (x < this.range[0] || x > this.range[1] || !(off < distance)) continue;
            best = x; distance = off;
          }
        }
      }
      return best;
    }

    // All values at x, highest first: between two points of a curve, interpolated.
    valuesAt(x) {
      const found = [];
      for (const series of this.visible) {
        for (const trace of series.traces) {
          const ys = this.ys(trace), i = lowerBound(trace.x, x), what = WHAT[trace.kind];
          const name = what && !trace.label ? `${series.name} (${what})` : trace.label || series.name;
          const add = (value, more = {}) => found.push({name, color: series.color, value, kind: trace.kind, ...more});
          if (trace.kind === 'diverged') { if (trace.x.includes(x)) add(null); continue; }
          if (trace.kind === 'best') continue; // also a point of its curve
          if (trace.x[i] === x) {
            const raw = trace.y;
            for (let j = i; trace.x[j] === x; j += 1) {
              if (ys[j] !== null) add(ys[j], ys === raw ? {} : {raw: raw[j]});
            }
          } else if (LINES.includes(trace.kind) && i > 0 && i < trace.x.length) {
            const [a, b] = [trace.x[i - 1], trace.x[i]], [u, v] = [ys[i - 1], ys[i]];
            if (u !== null && v !== null) add(u + (v - u) * (x - a) / (b - a), {between: true});
          }
        }
      }
      // A branch begins on its trunk: one row is enough.
      const repeats = row => row.kind === 'branch' && found.some(other => other.kind === 'line' &&
        other.color === row.color && Math.abs(other.value - row.value) <= 1e-6 * Math.abs(row.value));
      return found.filter(row => !repeats(row)).sort((a, b) => (b.value ?? Infinity) - (a.value ?? Infinity));
    }

    // Runs and their mean in one row: the mean, and next to it the runs.
    joined(rows) {
      const mean = row => rows.find(other => other.color === row.color && other.kind === 'line' && !other.between);
      const single = rows.filter(row => row.kind !== 'points' || !mean(row));
      return single.map(row => {
        const runs = rows.filter(other => other.kind === 'points' && mean(other) === row).map(other => other.value);
        return runs.length ? {...row, runs: runs.reverse()} : row;
      });
    }

    hover(px, py) {
      if (this.rows) return this.hoverRow(py);
      const x = this.nearest(Math.max(this.box.left, Math.min(this.box.right, px)));
      this.showAt(x, py);
      if (this.options.onHover) this.options.onHover(x, this);
    }

    showAt(x, py = null) {
      this.cursor = x;
      this.drawCursor();
      if (x === null) { this.tip.hidden = true; return; }
      const rows = this.joined(this.valuesAt(x));
      const off = row => row.value === null || py === null ? Infinity : Math.abs(this.sy(row.value) - py);
      const closest = rows.reduce((a, b) => off(b) < (a ? off(a) : Infinity) ? b : a, null);
      const kept = rows.length <= ROWS ? rows
        : [...rows].sort((a, b) => off(a) - off(b)).slice(0, ROWS).sort((a, b) => b.value - a.value);
      this.tip.replaceChildren(
        element('div', {class: 'chart-x'}, this.xWords(x)),
        ...kept.map(row => this.tipRow(row, row === closest)),
        ...(kept.length < rows.length ? [element('div', {class: 'more'}, `${rows.length - kept.length} more`)] : []),
      );
      this.placeTip(this.sx(x));
    }

    xWords(x) {
      const {x: {label, format}} = this.data, name = label.replace(/ \(log\)$/, '');
      if (format === 'time') return clock(x);
      const counted = name === 'tokens' || name === 'steps' || name === 'step';
      return counted ? `${exact(x)} ${name === 'step' ? 'steps' : name}` : `${name} ${short(x)}`;
    }

    tipRow(row, strong) {
      const value = row.value === null ? 'diverged' : `${row.between ? '≈ ' : ''}${exact(row.value)}`;
      const others = row.runs || (row.raw === undefined || row.raw === null ? [] : [row.raw]);
      const raw = others.length ? [element('i', {}, others.map(exact).join(' '))] : [];
      return element('div', {class: strong ? 'row strong' : 'row'},
        this.swatch(row.color, row.kind), element('span', {class: 'name'}, row.name), ...raw,
        element('b', {'data-value': row.value ?? ''}, value));
    }

    swatch(color, kind = 'line') {
      const dashed = kind === 'prediction' || dashOf(color) ? ' dashed' : '';
      return element('span', {class: `swatch${dashed}`, style: `color: ${colorOf(color)}`});
    }

    hoverRow(py) {
      const i = Math.round(this.sy.invert(py)), rows = [];
      for (const {traces} of this.visible) {
        for (const trace of traces.filter(item => !item.kind.startsWith('cut'))) {
          trace.y.forEach((y, j) => { if (y === i) rows.push([trace, j]); });
        }
      }
      this.tip.hidden = !rows.length;
      if (!rows.length) return;
      const above = (this.data.y.headings || []).filter(row => row < i).pop();
      const name = [above, i].filter(row => row !== undefined).map(row => this.rows[row]).filter(Boolean).join(', ');
      this.tip.replaceChildren(element('div', {class: 'chart-x'}, name), ...rows.map(([trace, j]) => {
        const [low, high] = (trace.spans || [])[j] || [], mean = signed(trace.x[j]);
        const interval = low === undefined || low === high ? '' : ` [${signed(low)}, ${signed(high)}]`;
        return element('div', {class: 'row'}, this.swatch(trace.color), element('span', {class: 'name'}, trace.label),
          element('b', {'data-value': trace.x[j]}, mean + interval));
      }));
      this.placeTip(this.sx(rows[0][0].x[rows[0][1]]), this.sy(i) + 14);
    }

    placeTip(x, y = this.box.top) {
      this.tip.hidden = false;
      const room = this.plot.clientWidth;
      this.tip.classList.toggle('below', room < NARROW); // a finger and the curves stay free
      if (room < NARROW) { this.tip.style.left = '0'; this.tip.style.top = '100%'; return; }
      const width = this.tip.offsetWidth;
      const right = x + 14 + width <= room, left = right ? x + 14 : x - 14 - width;
      this.tip.style.left = `${Math.max(0, Math.min(room - width, left))}px`;
      this.tip.style.top = `${y}px`;
    }

    drawCursor() {
      if (!this.over) return;
      const {over, box, cursor, brush} = this;
      over.replaceChildren();
      if (brush && Math.abs(brush[1] - brush[0]) > DRAG) {
        const [from, to] = [...brush].sort((a, b) => a - b);
        shape(over, 'rect', {class: 'brush', x: from, y: box.top, width: to - from, height: box.bottom - box.top});
      }
      if (cursor === null || this.rows || cursor < this.range[0] || cursor > this.range[1]) return;
      const x = this.sx(cursor);
      shape(over, 'path', {class: 'cross', d: `M${x.toFixed(1)} ${box.top}V${box.bottom}`});
      for (const {value, color} of this.valuesAt(cursor)) {
        const y = value === null ? NaN : this.sy(value);
        if (y >= box.top - 2 && y <= box.bottom + 2) {
          const group = shape(over, 'g', {style: `color: ${colorOf(color)}`});
          this.mark(group, 'settled', x, y, -0.5);
        }
      }
    }

    leave() {
      this.cursor = null;
      this.tip.hidden = true;
      this.drawCursor();
      if (this.options.onHover) this.options.onHover(null, this);
    }

    // -- zoom ---------------------------------------------------------------------------------

    // Show a range of x: at least a few points, at most the data.
    zoomTo(low, high) {
      const {logX} = this.state;
      if (!(high > low) || (logX && low <= 0)) return;
      this.set({zoom: [low, high].map(value => Number(value.toPrecision(6)))});
    }

    zoomBy(factor, center = (this.box.left + this.box.right) / 2) {
      const ends = [this.box.left, this.box.right].map(pixel => this.sx.invert(center + (pixel - center) * factor));
      const zoom = this.state.zoom;
      this.state.zoom = null;
      const [low, high] = this.xRange(); // of all data
      this.state.zoom = zoom;
      if (ends[0] <= low && ends[1] >= high) this.set({zoom: null});
      else this.zoomTo(Math.max(low, ends[0]), Math.min(high, ends[1]));
    }

    listen() {
      const at = event => {
        const box = this.svg.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      const {svg} = this;
      svg.addEventListener('pointerdown', event => {
        this.pointers.set(event.pointerId, at(event));
        if (event.pointerType === 'mouse' && event.button === 0 && !this.rows) {
          const x = at(event)[0];
          this.brush = [x, x];
          svg.setPointerCapture(event.pointerId);
        } else if (this.pointers.size === 2) {
          this.startPinch();
        } else if (this.box) {
          this.hover(...at(event));
        }
      });
      svg.addEventListener('pointermove', event => {
        if (!this.box) return;
        if (this.pointers.has(event.pointerId)) this.pointers.set(event.pointerId, at(event));
        if (this.pinch && this.pointers.size === 2) return this.movePinch();
        if (this.brush) this.brush[1] = Math.max(this.box.left, Math.min(this.box.right, at(event)[0]));
        this.hover(...at(event));
      });
      const end = event => {
        this.pointers.delete(event.pointerId);
        this.pinch = null;
        const {brush} = this;
        this.brush = null;
        if (brush && event.type === 'pointerup' && Math.abs(brush[1] - brush[0]) > DRAG) {
          this.zoomTo(...brush.sort((a, b) => a - b).map(this.sx.invert));
        } else this.drawCursor();
      };
      svg.addEventListener('pointerup', end);
      svg.addEventListener('pointercancel', end);
      svg.addEventListener('pointerleave', event => { if (event.pointerType === 'mouse') this.leave(); });
      svg.addEventListener('dblclick', () => this.set({zoom: null}));
      svg.addEventListener('blur', () => this.leave());
      svg.addEventListener('keydown', event => this.press(event));
      document.addEventListener('pointerdown', event => { if (!this.plot.contains(event.target)) this.leave(); });
    }

    startPinch() {
      const [a, b] = [...this.pointers.values()].map(([x]) => x);
      this.brush = null;
      this.pinch = {distance: Math.max(20, Math.abs(a - b)), center: (a + b) / 2, box: this.box, range: this.range,
        invert: this.sx.invert};
    }

    movePinch() {
      const [a, b] = [...this.pointers.values()].map(([x]) => x), {distance, center, box, invert} = this.pinch;
      const factor = distance / Math.max(20, Math.abs(a - b)), middle = (a + b) / 2;
      const ends = [box.left, box.right].map(pixel => invert(center + (pixel - middle) * factor));
      this.zoomTo(...ends);
    }

    press(event) {
      const moves = {ArrowLeft: -1, ArrowRight: 1};
      if (event.key in moves && !this.rows) this.stepCursor(moves[event.key]);
      else if (event.key === '+' || event.key === '=') this.zoomBy(0.5);
      else if (event.key === '-') this.zoomBy(2);
      else if (event.key === '0' || event.key === 'Escape') this.set({zoom: null});
      else return;
      event.preventDefault();
    }

    stepCursor(by) {
      const points = new Set(this.visible.flatMap(({traces}) => traces.flatMap(trace => trace.x)));
      const xs = [...points].filter(x => x >= this.range[0] && x <= this.range[1]).sort((a, b) => a - b);
      if (!xs.length) return;
      const i = this.cursor === null ? (by > 0 ? 0 : xs.length - 1) : lowerBound(xs, this.cursor) + by;
      const x = xs[Math.max(0, Math.min(xs.length - 1, i))];
      this.showAt(x);
      if (this.options.onHover) this.options.onHover(x, this);
    }

    // -- legend and tools ---------------------------------------------------------------------

    drawLegend() {
      // Where no trace has a label, the rows of the figure name what is shown.
      const named = this.series.filter(series => series.traces.some(trace => trace.label));
      this.legend.replaceChildren(...named.map(series => {
        const button = element('button', {
          type: 'button', 'data-series': series.name, title: 'Hide or show; Alt or a long press shows only this one',
        }, this.swatch(series.color, series.traces[0].kind), series.name);
        pressable(button, isolate => this.toggle(series.name, isolate));
        const focus = color => { this.focus = color; this.draw(); };
        button.addEventListener('pointerenter', () => focus(series.color));
        button.addEventListener('pointerleave', () => focus(null));
        return button;
      }));
      this.markLegend();
    }

    markLegend() {
      for (const button of this.legend.children) {
        button.setAttribute('aria-pressed', String(!this.state.hidden.includes(button.dataset.series)));
      }
    }

    drawTools() {
      const add = (text, title, action, name) => {
        const button = element('button', {type: 'button', title, 'data-tool': name}, text);
        button.addEventListener('click', action);
        return button;
      };
      const parts = [];
      const longest = Math.max(0, ...this.data.traces.filter(trace => trace.kind === 'line').map(trace => trace.x.length));
      if (longest > 8) {
        this.slider = element('input', {type: 'range', min: 0, max: 0.99, step: 0.01, 'aria-label': 'Smoothing'});
        this.slider.addEventListener('input', () => this.set({smooth: Number(this.slider.value)}));
        parts.push(element('label', {title: 'Exponential smoothing', 'data-tool': 'smooth'}, 'smooth', this.slider));
      }
      const positive = axis => this.data.traces.some(trace => trace[axis].some(value => value > 0));
      if (positive('x')) parts.push(add('log x', 'Logarithmic x axis', () => this.set({logX: !this.state.logX, zoom: null}), 'logX'));
      if (positive('y')) parts.push(add('log y', 'Logarithmic y axis', () => this.set({logY: !this.state.logY}), 'logY'));
      parts.push(
        add('−', 'Zoom out', () => this.zoomBy(2), 'out'),
        add('+', 'Zoom in; or drag across the chart', () => this.zoomBy(0.5), 'in'),
        add('reset', 'Show everything as it was', () => this.set({...this.defaults}), 'reset'),
      );
      const wanted = part => !this.options.tools || this.options.tools.includes(part.dataset.tool);
      this.tools.replaceChildren(...parts.filter(wanted));
      this.markTools();
    }

    markTools() {
      if (this.slider) this.slider.value = this.state.smooth;
      for (const button of this.tools.querySelectorAll('button')) {
        const {tool} = button.dataset;
        if (tool === 'logX' || tool === 'logY') button.setAttribute('aria-pressed', String(this.state[tool]));
        if (tool === 'reset') button.disabled = !toText(this);
      }
    }
  }

  function widen(low, high, log, share) {
    if (log) {
      const pad = high > low ? (high / low) ** share : 1.5;
      return [low / pad, high * pad];
    }
    const pad = high > low ? share * (high - low) : Math.abs(high) * 0.05 || 1;
    return [low - pad, high + pad];
  }

  const signed = value => `${value < 0 ? '−' : '+'}${Math.abs(value).toFixed(4)}`;

  // Call action(false) on a click, and action(true) on a click with Alt or a long press.
  function pressable(button, action) {
    let timer = 0, held = false;
    button.addEventListener('pointerdown', () => {
      held = false;
      timer = setTimeout(() => { held = true; action(true); }, LONG_PRESS);
    });
    for (const name of ['pointerup', 'pointerleave', 'pointercancel']) {
      button.addEventListener(name, () => clearTimeout(timer));
    }
    button.addEventListener('click', event => {
      if (!held) action(event.altKey);
      held = false;
    });
    button.addEventListener('contextmenu', event => { if (held) event.preventDefault(); });
  }

  // -- the view as text, for the address -----------------------------------------------------

  // Replace what follows the # soon: a slider changes more often than browsers accept.
  let waiting = 0;
  function setAddress(text) {
    clearTimeout(waiting);
    const write = () => history.replaceState(null, '', text ? `#${text}` : location.pathname + location.search);
    waiting = setTimeout(write, SOON);
  }

  function toText(chart) {
    const {state, defaults} = chart, parts = new URLSearchParams();
    if (state.hidden.length) parts.set('hide', state.hidden.map(encodeURIComponent).join(','));
    if (state.smooth) parts.set('smooth', state.smooth);
    if (state.logX !== defaults.logX) parts.set('logx', Number(state.logX));
    if (state.logY !== defaults.logY) parts.set('logy', Number(state.logY));
    if (state.zoom) parts.set('zoom', state.zoom.join('..'));
    return parts.toString();
  }

  function fromText(chart, text) {
    const parts = new URLSearchParams(text), {defaults} = chart, state = {...defaults};
    const number = Number(parts.get('smooth'));
    if (number > 0 && number < 1) state.smooth = number;
    if (parts.has('hide')) state.hidden = parts.get('hide').split(',').map(decodeURIComponent);
    if (parts.has('logx')) state.logX = parts.get('logx') === '1';
    if (parts.has('logy')) state.logY = parts.get('logy') === '1';
    const zoom = (parts.get('zoom') || '').split('..').map(Number);
    if (zoom.length === 2 && zoom[0] < zoom[1]) state.zoom = zoom;
    return state;
  }

  // -- the figures of a report ---------------------------------------------------------------

  // The address is #fig-a?zoom=..;fig-b?hide=..: the figure that was changed last comes first, and
  // a page that is opened with it scrolls there.
  class Figures {
    constructor() {
      this.charts = new Map();
      for (const script of document.querySelectorAll('figure > script.chart')) this.add(script);
      this.read();
      window.addEventListener('hashchange', () => this.read());
    }

    add(script) {
      const figure = script.parentNode, caption = figure.querySelector('figcaption');
      const host = element('div');
      script.after(host);
      figure.classList.add('has-chart');
      try {
        const options = {label: caption ? caption.textContent : '', onChange: () => this.write(figure.id)};
        this.charts.set(figure.id, new Chart(host, JSON.parse(script.textContent), options));
      } catch (error) { // the picture is there
        host.remove();
        figure.classList.remove('has-chart');
        console.error(`${figure.id}: ${error.stack}`);
      }
    }

    write(changed) {
      const ids = [changed, ...[...this.charts.keys()].filter(id => id !== changed)];
      const texts = ids.map(id => [id, toText(this.charts.get(id))]).filter(([, text]) => text);
      setAddress(texts.map(([id, text]) => `${id}?${text}`).join(';'));
    }

    read() {
      if (!location.hash.includes('?')) return; // a link to a part of the page
      const views = new Map(location.hash.slice(1).split(';').map(part => part.split(/\?(.*)/s)));
      for (const [id, chart] of this.charts) chart.set(fromText(chart, views.get(id) || ''), true);
      const first = document.getElementById([...views.keys()][0]);
      if (!first) return;
      for (let fold = first.closest('details'); fold; fold = fold.parentNode.closest('details')) fold.open = true;
      first.scrollIntoView({block: 'center'});
    }
  }

  const figures = document.querySelector('figure > script.chart') ? new Figures() : null;
  return {Chart, figures, clock, colorOf, dashOf, element, exact, setAddress, short};
})();
