// The page without its charts: tables that sort, contents that show where the reader is.

// Sorting of tables: a click on a column's header sorts by it, a second click the other way.

function keyOf(row, column) {
  const cell = row.cells[column];
  const text = cell.textContent.trim();
  const number = cell.dataset.v;
  if (number !== undefined) return {number: parseFloat(number), text};
  return {number: NaN, text: text === '-' ? '' : text};
}

// Numbers come before words, and empty cells last.
function compare(a, b) {
  if (!a.text || !b.text) return a.text ? -1 : b.text ? 1 : 0;
  const aIsText = isNaN(a.number), bIsText = isNaN(b.number);
  if (!aIsText && !bIsText) return a.number - b.number;
  return aIsText && bIsText ? a.text.localeCompare(b.text) : aIsText ? 1 : -1;
}

function sortBy(header) {
  const body = header.closest('table').tBodies[0];
  const descending = header.getAttribute('aria-sort') === 'ascending';
  for (const other of header.parentNode.cells) other.setAttribute('aria-sort', 'none');
  header.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
  const rows = Array.from(body.rows, row => ({row, key: keyOf(row, header.cellIndex)}));
  rows.sort((a, b) => {
    const emptyLast = !a.key.text || !b.key.text;
    return descending && !emptyLast ? compare(b.key, a.key) : compare(a.key, b.key);
  });
  body.append(...rows.map(item => item.row));
}

document.addEventListener('click', event => {
  const button = event.target.closest('th button');
  if (button) sortBy(button.parentNode);
});

// The contents: they mark the part that is being read, and fold on a narrow page.

function followContents(contents) {
  const button = contents.querySelector('button');
  const links = Array.from(contents.querySelectorAll('a'));

  function fold(folded) {
    contents.classList.toggle('folded', folded);
    button.setAttribute('aria-expanded', String(!folded));
  }

  function mark() {
    const isAbove = link => {
      const target = document.getElementById(link.hash.slice(1));
      return target.getBoundingClientRect().top <= innerHeight / 4;
    };
    const current = links.filter(isAbove).at(-1) || links[0];
    for (const link of links) link.removeAttribute('aria-current');
    for (const item of contents.querySelectorAll('.current')) item.classList.remove('current');
    current.setAttribute('aria-current', 'true');
    current.closest('.contents > ul > li').classList.add('current');
    contents.querySelector('.where').textContent = `· ${current.textContent}`;
  }

  let waiting = false;
  addEventListener('scroll', () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; mark(); });
  }, {passive: true});
  button.addEventListener('click', () => fold(!contents.classList.contains('folded')));
  contents.addEventListener('click', event => { if (event.target.closest('a')) fold(true); });
  contents.classList.add('marks');
  fold(true);
  mark();
}

// A link to a folded table opens it.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const box = target && target.closest('details');
  if (box && !box.open) {
    box.open = true;
    target.scrollIntoView();
  }
}

// What is folded is printed too.
function openForPrint() {
  for (const box of document.querySelectorAll('details:not([open])')) {
    box.open = true;
    box.dataset.folded = '';
  }
}

function foldAfterPrint() {
  for (const box of document.querySelectorAll('details[data-folded]')) {
    box.open = false;
    delete box.dataset.folded;
  }
}

addEventListener('hashchange', openTarget);
addEventListener('beforeprint', openForPrint);
addEventListener('afterprint', foldAfterPrint);
openTarget();
followContents(document.querySelector('.contents'));
