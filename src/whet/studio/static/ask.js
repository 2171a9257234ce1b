/* Questions to the server. What changes anything is POST with the page's own token. */

let pageToken = "";

/** Keep the token that the first answer brings. */
export function useToken(token) {
  pageToken = token;
}

/** An answer to GET. Error: what the server said. */
export function ask(name, query = {}) {
  const text = Object.entries(query).map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  return answered(`api/${name}${text ? `?${text}` : ""}`, { headers: { Accept: "application/json" } });
}

/** An answer to POST. The error of a refusal has `status` and `told`, all that the server said. */
export function tell(name, fields = {}) {
  return answered(`api/${name}`, { method: "POST", body: JSON.stringify(fields),
    headers: { "Content-Type": "application/json", "X-Whet-Page": pageToken } });
}

async function answered(url, options) {
  let response;
  try {
    response = await fetch(url, { cache: "no-store", ...options });
  } catch {
    throw new Error("The server does not answer. Is `whet studio` still running?");
  }
  let told;
  try {
    told = await response.json();
  } catch {
    throw new Error(`The server answered ${response.status} with something other than JSON.`);
  }
  if (response.ok) return told;
  throw Object.assign(new Error(told?.error ?? `The server answered ${response.status}.`), { status: response.status, told });
}
