// Ranking of the site's search, in place of Sphinx's: guides before reference pages, numbers are words, excerpts without a network.
// page_index.js sets LEAKMEL_PAGES: [docname, title, weight, text] of each page.
"use strict";

const searchWords = (text) => (text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || []).map((word) => word.replace(/(?<=\p{L}{3,})(?:s|ing|ed)$/u, ""));

// Words that every page has do not count, unless a query has no others.
const searchCommon = new Set(["a", "an", "and", "for", "in", "is", "of", "the", "to", "with"]);

const searchExcerpt = (text, words) => {
  const lower = text.toLowerCase();
  const places = words.map((word) => lower.indexOf(word)).filter((place) => place >= 0);
  const first = Math.max(0, Math.min(...(places.length ? places : [0])) - 60);
  const start = first ? text.indexOf(" ", first) + 1 : 0;
  return (start ? "… " : "") + text.slice(start, start + 180) + (start + 180 < text.length ? " …" : "");
};

// Returns [score, page index], best first. A page counts if it holds every word, or most of them where no page holds all.
const rankPages = (pages, query) => {
  const all = [...new Set(searchWords(query))];
  const rare = all.filter((word) => !searchCommon.has(word));
  const words = rare.length ? rare : all;
  const indexed = pages.map(([, title, weight, text]) => ({ weight, title: searchWords(title), text: searchWords(text) }));
  const count = (list, word) => list.filter((other) => other === word || (word.length > 2 && other.startsWith(word))).length;
  const found = indexed.map((page) => words.map((word) => [count(page.title, word), count(page.text, word)]));
  const rarity = words.map((_, k) => Math.log(1 + pages.length / (1 + found.filter((page) => page[k][0] + page[k][1]).length)));
  const matched = found.map((page) => page.filter(([title, text]) => title + text).length);
  const enough = Math.max(1, Math.min(words.length, Math.max(...matched)));
  return found
    .map((page, i) => {
      const parts = page.map(([title, text], k) => rarity[k] * ((title ? 4 : 0) + text / (text + 1.5) + text / (20 + indexed[i].text.length / 20)));
      return [matched[i] >= enough ? indexed[i].weight * parts.reduce((a, b) => a + b, 0) : 0, i];
    })
    .filter(([score]) => score > 0)
    .sort((a, b) => b[0] - a[0]);
};

if (typeof Search !== "undefined" && typeof LEAKMEL_PAGES !== "undefined") {
  const suffix = ".html";
  Search._performSearch = (query) => {
    const words = searchWords(query);
    return rankPages(LEAKMEL_PAGES, query)
      .map(([score, i]) => {
        const [name, title, , text] = LEAKMEL_PAGES[i];
        return [name, title, "", searchExcerpt(text, words), score, name + suffix, "text"];
      })
      .reverse(); // Sphinx shows the last one first
  };
}
