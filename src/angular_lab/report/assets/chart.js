// Interactive charts, from the JSON that charts.py puts next to each picture of a page.
