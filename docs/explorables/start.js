// Starts the explorable of a page. Its code is fetched only by pages that have one, and again for every page that
// instant navigation brings.
function start() {
  for (const box of document.querySelectorAll("[data-explorable]:not([data-started])")) {
    box.dataset.started = "";
    import(`./${box.dataset.explorable}.js`).then((module) => module.mount(box));
  }
}

if (typeof document$ !== "undefined") document$.subscribe(start);
else start();
