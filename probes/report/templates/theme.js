"use strict";
// Before anything is drawn, so that the page does not flash in the other scheme. Storage may be closed to files.
(() => {
  let wanted = null;
  try { wanted = localStorage.getItem("headwater-theme"); } catch { /* as the system has it */ }
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
})();
