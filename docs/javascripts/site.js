// Formulas and diagrams, drawn by the libraries in vendor/, which are fetched only by pages that need them.
(function () {
  "use strict";
  const here = document.currentScript.src.replace(/javascripts\/site\.js.*$/, "");
  const loaded = {};

  function load(path) {
    loaded[path] = loaded[path] || new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = here + path;
      script.onload = resolve;
      script.onerror = function () { reject(new Error("cannot load " + path)); };
      document.head.appendChild(script);
    });
    return loaded[path];
  }

  async function formulas() {
    if (!document.querySelector(".arithmatex")) return;
    if (!window.MathJax) {
      window.MathJax = {
        startup: { typeset: false },
        tex: {
          inlineMath: [["\\(", "\\)"]],
          displayMath: [["\\[", "\\]"]],
          macros: {
            latent: ["\\class{latent}{#1}", 1],
            rope: ["\\class{rope}{#1}", 1],
            perhead: ["\\class{per-head}{#1}", 1],
            query: ["\\class{query}{#1}", 1],
          },
        },
        options: { enableMenu: false, ignoreHtmlClass: "md-container", processHtmlClass: "arithmatex" },
        svg: { fontCache: "local" },
      };
    }
    await load("vendor/mathjax/tex-svg.js");
    await MathJax.startup.promise;
    MathJax.typesetClear();
    await MathJax.typesetPromise();
  }

  let drawing = 0;

  async function diagrams() {
    const blocks = [...document.querySelectorAll(".diagram")];
    if (!blocks.length) return;
    const turn = ++drawing;
    await load("vendor/mermaid/mermaid.min.js");
    const style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue(name).trim();
    const text = document.body.dataset.mdColorScheme === "slate" ? "#e6e8ec" : "#1f2937";
    mermaid.initialize({
      startOnLoad: false,
      securityLevel: "strict",
      theme: "base",
      fontFamily: style.fontFamily,
      flowchart: { useMaxWidth: true, htmlLabels: true, curve: "basis" },
      themeVariables: {
        background: "transparent",
        primaryColor: colour("--mla-panel"),
        primaryBorderColor: colour("--mla-latent"),
        primaryTextColor: text,
        lineColor: colour("--mla-grey"),
        textColor: text,
        secondaryColor: colour("--mla-panel"),
        tertiaryColor: colour("--mla-panel"),
        edgeLabelBackground: style.backgroundColor,
      },
    });
    const concepts = { latent: "latent", rope: "rope", query: "query", head: "per-head", error: "error" };
    const classes = Object.entries(concepts)
      .map(([name, variable]) => "classDef " + name + " stroke:" + colour("--mla-" + variable) + ",stroke-width:2px");
    for (const [i, block] of blocks.entries()) {
      const source = block.dataset.source || block.textContent;
      const { svg } = await mermaid.render("diagram-" + turn + "-" + i, [source, ...classes].join("\n"));
      if (turn !== drawing) return;  // the palette changed meanwhile
      const drawn = document.createElement("div");  // in the <pre> that it was, another font would apply
      drawn.className = "diagram";
      drawn.dataset.source = source;
      drawn.innerHTML = svg;
      drawn.firstChild.style.minWidth = 0.6 * parseFloat(drawn.firstChild.style.maxWidth) + "px";  // readable: it scrolls
      block.replaceWith(drawn);
    }
  }

  // Printed columns: four lines in a row that are too long for the page must not wrap.
  function columns() {
    for (const code of document.querySelectorAll(".language-text pre > code")) {
      let run = 0;
      if (code.textContent.split("\n").some((line) => (run = line.length > 96 ? run + 1 : 0) > 3)) code.classList.add("columns");
    }
  }

  function draw() {
    columns();
    formulas();
    diagrams();
  }

  if (typeof document$ !== "undefined") document$.subscribe(draw);
  else document.addEventListener("DOMContentLoaded", draw);
  new MutationObserver(diagrams).observe(document.documentElement, {
    subtree: true, attributes: true, attributeFilter: ["data-md-color-scheme"],
  });
})();
