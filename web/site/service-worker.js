// Keeps every file of the page, the models too: what the server has, or offline what was kept of it.

const { version, files } = BUILD; // Filled in when the page is built.

addEventListener("install", (event) => {
  skipWaiting();
  const wanted = files.map((file) => new Request(file, { cache: "no-cache" }));
  event.waitUntil(caches.open(version).then((cache) => cache.addAll(wanted)));
});

addEventListener("activate", (event) => {
  const others = caches.keys().then((names) => names.filter((name) => name !== version));
  event.waitUntil(others.then((names) => Promise.all(names.map((name) => caches.delete(name)))).then(() => clients.claim()));
});

addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET") return;
  event.respondWith(
    fetch(request.url, { cache: "no-cache" }).catch(async (error) => {
      const kept = await caches.match(request, { ignoreSearch: true });
      if (kept) return kept;
      throw error;
    }),
  );
});
