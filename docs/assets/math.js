// Render the formulas that pymdownx.arithmatex has marked as \(...\) and \[...\].
document$.subscribe(() => {
  for (const formula of document.querySelectorAll(".arithmatex")) {
    const text = formula.textContent.trim();
    katex.render(text.slice(2, -2), formula, {
      displayMode: text.startsWith("\\["),
      throwOnError: false,
    });
  }
});
