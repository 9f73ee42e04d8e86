// Looks at a report's page once it is loaded and leaves the result in an attribute of <html>, so
// that a test in a headless browser needs no driver. The tests put it into a copy of the page.

const errors = [];
window.addEventListener('error', event => errors.push(String(event.message)));

function isSorted(table, column, sign) {
  const keys = Array.from(table.tBodies[0].rows, row => keyOf(row, column)).filter(k => k.text);
  return keys.every((key, i) => i === 0 || sign * compare(keys[i - 1], key) <= 0);
}

// A figure shows its chart; its picture is for pages without a script, and for paper.
function isHidden(figure) {
  return Array.from(figure.querySelectorAll('svg')).every(svg => {
    const box = svg.getBoundingClientRect();
    return box.width < 50 || box.height < 50 || !svg.querySelector('path');
  });
}

function sortEveryColumn() {
  let clicks = 0, wrong = 0;
  for (const table of document.querySelectorAll('table')) {
    Array.from(table.tHead.rows[0].cells).forEach((header, i) => {
      for (const [state, sign] of [['ascending', 1], ['descending', -1]]) {
        header.querySelector('button').click();
        clicks += 1;
        if (header.getAttribute('aria-sort') !== state || !isSorted(table, i, sign)) wrong += 1;
      }
    });
  }
  return {clicks, wrong};
}

// Of what tells the result: how many words reach over the right edge.
function countCut() {
  const width = document.documentElement.clientWidth;
  const told = Array.from(document.querySelectorAll('.result p, .lead figure, summary'));
  return told.filter(element => element.getBoundingClientRect().right > width).length;
}

// The height of the smallest letters in a figure, in pixels of the screen.
function smallestLetters() {
  const sizes = Array.from(document.querySelectorAll('svg text'), text => {
    const svg = text.closest('svg');
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return scale * parseFloat(getComputedStyle(text).fontSize);
  });
  return Math.min(...sizes);
}

function selfCheck() {
  const root = document.documentElement;
  const before = {
    current: document.querySelector('.contents [aria-current]').getAttribute('href'),
    folded: getComputedStyle(document.querySelector('.contents > ul')).display === 'none',
    opened: Array.from(document.querySelectorAll('details.fold[open]'), box => box.id),
    cut: countCut(),
  };
  for (const details of document.querySelectorAll('details')) details.open = true;
  const figures = Array.from(document.querySelectorAll('figure'));
  const ids = Array.from(document.querySelectorAll('[id]'), element => element.id);
  const links = Array.from(document.querySelectorAll('nav a'), a => a.getAttribute('href'));
  return {
    ...before,
    letters: smallestLetters(),
    ...sortEveryColumn(),
    figures: figures.length,
    hidden: figures.filter(isHidden).length,
    overflow: root.scrollWidth - root.clientWidth,
    repeated: ids.length - new Set(ids).size,
    lost: links.filter(link => !document.getElementById(link.slice(1))).length,
    errors,
  };
}

window.addEventListener('load', () => setTimeout(() => {  // after the page has scrolled
  const result = JSON.stringify(selfCheck());
  document.documentElement.dataset.selfcheck = result;
  if (parent !== window) parent.postMessage(result, '*');
}, 200));
