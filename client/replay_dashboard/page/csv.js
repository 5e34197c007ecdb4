// Offers the numbers of a chart as a CSV file.
import { h } from "./dom.js";

// A text that a spreadsheet would run as a formula begins with an apostrophe.
const cell = (value) => {
  if (value === null || value === undefined || typeof value === "number") return String(value ?? "");
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
export const csvOf = (rows) => rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
// Columns of equal length, each with its name in front.
export const columnsOf = (names, columns) => [names, ...columns[0].map((_, i) => columns.map((column) => column[i]))];

function save(name, rows) {
  const url = URL.createObjectURL(new Blob([csvOf(rows)], { type: "text/csv" }));
  h("a", { href: url, download: `${name.replace(/[^\w.-]+/g, "-")}.csv` }).click();
  URL.revokeObjectURL(url);
}
// A button for the file. A click calls `rows`, which returns the rows of the file.
export const csvButton = (name, rows) => h("button", { type: "button", class: "csv", "aria-label": `CSV of ${name}`,
  title: `The numbers of ${name} as a file`, onclick: () => save(name, rows()) }, "CSV");
