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
