// Error texts are pasted into the search. Its query language gives ":", "+", "-", "~", "^" and "*" meanings of their own.
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/[^\p{L}\p{N}_.\s]+/gu, " ");
}, true);
